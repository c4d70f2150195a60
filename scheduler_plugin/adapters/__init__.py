"""The world: the Kubernetes API, HTTP servers and clocks. Thin: they translate types and errors, and decide nothing."""
