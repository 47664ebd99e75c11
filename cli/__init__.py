"""The command line: each verb parses its arguments, calls the library function of its name and renders the result."""
