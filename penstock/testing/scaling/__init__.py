"""A simulator of replicas under load: what a policy of the autoscaler costs, and which promises it keeps."""
