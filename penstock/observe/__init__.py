"""What monitoring gets of a deployment: Prometheus with its rules, dashboards for Grafana and Google Cloud."""
