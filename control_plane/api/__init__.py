"""What crosses the control plane's wire, and its route table."""
