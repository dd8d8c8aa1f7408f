"""`enginesmith check`: compares what a changed spec would serve with what a channel serves, for a pull request."""
