#pragma once
#include "../../half.h"
