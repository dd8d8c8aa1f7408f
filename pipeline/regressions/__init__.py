"""`enginesmith check`: what a change of a spec would serve, against what a channel serves, for a pull request."""
