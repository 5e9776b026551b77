// Everything it declares is force-included.
#pragma once
