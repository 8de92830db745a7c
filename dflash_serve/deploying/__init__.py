"""`dflash-serve deploy`: one Deployment as Helm values, manifests, a Dynamo graph, a KServe service, a compose file."""
