"""The command line: each verb parses, calls the library function of its name, and shows what that returns."""
