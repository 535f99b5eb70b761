"""What people touch: the command line, the page in the browser, the plots."""
