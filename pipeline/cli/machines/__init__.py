"""Commands about machines and clusters: backends, doctor, deploy, fleet."""
