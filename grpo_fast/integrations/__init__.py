"""Drop-in parts for other libraries, one file each. Importing this package imports none of them."""
