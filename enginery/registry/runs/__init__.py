"""Records of pipeline runs: state, result, and the time and memory of builds."""
