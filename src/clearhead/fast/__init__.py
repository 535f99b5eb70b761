"""Speed: modules that compute what the core's parts compute, faster on some machine."""
