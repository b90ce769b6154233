"""The words of verbs whose work a child process does: the command line and that process read them alike."""
