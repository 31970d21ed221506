"""Files that are whole or not there, and a folder that is the user's alone."""
