"""Commands of the command line beside `check`: what is done with reports, and what a project is set up with."""
