"""Networks of tasks: namespaces, addresses, ports, the firewall, files of names."""
