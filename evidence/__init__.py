"""A study: does TROLL beat a clip, when, and by how much? README.md has the results and the commands."""
