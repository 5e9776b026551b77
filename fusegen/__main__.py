"""`python -m fusegen` is `fusegen`."""

from fusegen.cli import main

if __name__ == "__main__":
    main()
