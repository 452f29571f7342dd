"""The command line: each verb parses what was typed, calls the library, and prints."""
