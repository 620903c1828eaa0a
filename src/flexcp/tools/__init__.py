"""What is built on the library: the command line, the report page, verify, train."""
