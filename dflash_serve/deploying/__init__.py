"""`dflash-serve deploy`: a Deployment as values of the Helm chart, or as the manifests that the chart makes of them."""
