"""The command line. One module a command; nothing here imports torch before work starts."""
