{{- /* Values that would make a meaningless or an unguarded manifest, and that the schema cannot refuse. All problems are
told at once, each in a line: where: problem; remedy. `dflash-serve deploy` checks the deployment itself. */ -}}
{{- define "dflash-serve.validate" -}}
{{- $found := list -}}
{{- range $part := list "engine" "images" "models" "jobs" "nodes" "pair" "scaling" "doors" "environment" "tests" -}}
  {{- range include (printf "dflash-serve.problems.%s" $part) $ | trim | splitList "\n" -}}
    {{- with trim . }}{{ $found = append $found . }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- with $found }}{{ fail (printf "\n\n  %s\n" (join "\n  " .)) }}{{ end -}}
{{- end -}}

{{- define "dflash-serve.problems.engine" -}}
{{- if not (or .Values.engine (.Files.Get "files/engines.yaml")) }}
chart: this folder is not the whole chart, files made from the code are missing; run `make chart` and use build/dflash-serve
{{- else if not (or .Values.engine (include "dflash-serve.isKnown" .)) }}
backend: the chart does not know {{ .Values.backend | quote }}; give its `engine`, as `dflash-serve deploy --render helm` writes it{{ end }}
{{- end -}}

{{- define "dflash-serve.problems.images" -}}
{{- if and .Values.build.enabled (not (and .Values.build.image.repository .Values.build.image.digest)) }}
build.image: no image; give the repository and the digest of deploy/docker/engines.Dockerfile{{ end }}
{{- if ne (eq .Values.models.kind "image") (ne .Values.models.image "") }}
models.image: {{ .Values.models.image | quote }} and kind {{ .Values.models.kind }} do not go together; repository@sha256:<64 hexadecimal digits> belongs to kind image{{ end }}
{{- if and (eq .Values.models.kind "image") (not (semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version)) }}
models.kind: image volumes need Kubernetes 1.33, this is {{ .Capabilities.KubeVersion.Version }}; use claim{{ end }}
{{- end -}}

{{- define "dflash-serve.problems.models" -}}
{{- $pods := mul (include "dflash-serve.maxReplicas" .) (include "dflash-serve.facts" . | fromYaml).nodes }}
{{- with .Values.models }}
{{- if ne (eq .kind "claim") (ne .claim "") }}
models.claim: {{ .claim | quote }} and kind {{ .kind }} do not go together; a PersistentVolumeClaim of this namespace belongs to kind claim{{ end }}
{{- if ne (eq .kind "node") (ne .path "") }}
models.path: {{ .path | quote }} and kind {{ .kind }} do not go together; a folder of the node, such as /raid/models, belongs to kind node{{ end }}
{{- if and .storageClassName (ne .kind "volume") }}
models.storageClassName: {{ .storageClassName | quote }} and kind {{ .kind }} do not go together; a storage class belongs to kind volume{{ end }}
{{- if and (has .kind (list "volume" "claim")) (ne .accessMode "ReadWriteMany") (gt $pods 1) }}
models.accessMode: {{ .accessMode }} serves one node, but there may be {{ $pods }} pods; use ReadWriteMany, or another models.kind{{ end }}
{{- end }}
{{- with .Values.cache }}
{{- if ne (eq .kind "node") (ne .path "") }}
cache.path: {{ .path | quote }} and kind {{ .kind }} do not go together; a folder of the node, such as /raid/cache, belongs to kind node{{ end }}
{{- if and (eq .kind "models") (not (has $.Values.models.kind (list "volume" "claim" "node"))) }}
cache.kind: models of kind {{ $.Values.models.kind }} keep nothing; use models.kind volume, claim or node, or cache.kind node{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.jobs" -}}
{{- $claim := eq .Values.models.kind "claim" }}
{{- if and .Values.models.download.enabled (not $claim) }}
models.download: the Job runs before the release exists, and models.kind {{ .Values.models.kind }} comes with it; make a claim, and name it in models.claim{{ end }}
{{- if and .Values.build.enabled (not (and $claim (eq .Values.models.accessMode "ReadWriteMany"))) }}
build.enabled: the build writes before the release exists and while servers read; use models.kind claim with accessMode ReadWriteMany{{ end }}
{{- with .Values.certify.enabled }}
{{- $facts := include "dflash-serve.facts" $ | fromYaml }}
{{- if or (not $facts.speculates) (gt ($facts.nodes | int) 1) }}
certify.enabled: it compares a server on one node with and without its drafter; give a drafter and one node, or set it to false{{ end }}
{{- if eq $.Values.models.kind "volume" }}
certify.enabled: the Job runs before the release exists, and models.kind volume comes with it; make a claim, and name it in models.claim{{ end }}
{{- end }}
{{- $recipe := .Values.build.recipe | fromYaml }}
{{- if and .Values.build.enabled (not (and (hasKey $recipe "deployment") (hasKey $recipe "build"))) }}
build.recipe: not a recipe with `deployment` and `build`; give a file: --set-file build.recipe=engines/recipes/qwen3-8b-b200.yaml{{ end }}
{{- range $name := list "target" "drafter" }}
{{- if and (hasPrefix "/build" (dig "model" "" (get $.Values.deployment $name | default dict))) (not $.Values.build.enabled) }}
deployment.{{ $name }}.model: below /build, but nothing is built; set build.enabled{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.nodes" -}}
{{- $facts := include "dflash-serve.facts" . | fromYaml }}
{{- if and (gt ($facts.nodes | int) 1) (ne .Values.backend "sglang") (include "dflash-serve.isKnown" .) }}
deployment.parallel.nodes: the chart starts {{ .Values.backend }} on one node, not {{ $facts.nodes }}; use sglang{{ end }}
{{- if mod ($facts.count | int) ($facts.nodes | int) }}
deployment.parallel.nodes: {{ $facts.count }} devices do not spread evenly over {{ $facts.nodes }} nodes; change one{{ end }}
{{- $role := dig "role" "whole" .Values.deployment }}
{{- if ne $role "whole" }}
deployment.role: {{ $role }} is one half of a pair; give both in deployment.pair, and leave role out{{ end }}
{{- if .Values.placement.computeDomain }}
{{- if or (gt (include "dflash-serve.maxReplicas" . | int) 1) (gt (int .Values.rollout.maxSurge) 0) (eq ($facts.nodes | int) 1) }}
placement.computeDomain: a domain belongs to one replica of several nodes; set replicas to 1, autoscaling.kind to none and rollout.maxSurge to 0{{ end }}
{{- if not (semverCompare ">=1.32.0-0" .Capabilities.KubeVersion.Version) }}
placement.computeDomain: NVIDIA's DRA driver needs Kubernetes 1.32, this is {{ .Capabilities.KubeVersion.Version }}{{ end }}
{{- end }}
{{- with .Values.placement.topology }}
{{- if and .key (eq ($facts.nodes | int) 1) }}
placement.topology.key: it keeps the nodes of one replica together, and there is one; leave it out{{ end }}
{{- if and .key (not .exclusive) (not (semverCompare ">=1.31.0-0" $.Capabilities.KubeVersion.Version)) }}
placement.topology.key: needs Kubernetes 1.31, this is {{ $.Capabilities.KubeVersion.Version }}; set placement.topology.exclusive{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.pair" -}}
{{- if include "dflash-serve.isPair" . }}
{{- if ne .Values.backend "sglang" }}
deployment.pair: the chart routes pairs of sglang, not of {{ .Values.backend }}; use dflash-serve deploy --render dynamo{{ end }}
{{- range $half := list "prefill" "decode" }}
{{- $facts := include "dflash-serve.facts" (dict "Values" (merge (dict "half" $half) $.Values) "Files" $.Files) | fromYaml }}
{{- if mod ($facts.count | int) ($facts.nodes | int) }}
deployment.pair.{{ $half }}: {{ $facts.count }} devices do not spread evenly over {{ $facts.nodes }} nodes; change one{{ end }}
{{- end }}
{{- if ne .Values.autoscaling.kind "none" }}
autoscaling.kind: the halves of a pair have fixed numbers of replicas; set it to none{{ end }}
{{- if ne (int .Values.replicas) 1 }}
replicas: each half of a pair has its own; set deployment.pair.prefill.replicas and deployment.pair.decode.replicas{{ end }}
{{- if .Values.placement.computeDomain }}
placement.computeDomain: the halves of a pair are several replicas, and a domain belongs to one; leave it out{{ end }}
{{- if .Values.certify.enabled }}
certify.enabled: it starts servers of its own; run dflash-serve certify with --url and --without-url{{ end }}
{{- if .Values.inferencePool.enabled }}
inferencePool.enabled: SGLang's router chooses the servers of a pair; leave it out{{ end }}
{{- if .Values.secrets.apiKeys.name }}
secrets.apiKeys.name: SGLang's router takes a key on its command line only, which others can read; check keys in a gateway{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.scaling" -}}
{{- range $name, $_ := dig "engine_args" "vllm" dict .Values.deployment }}
{{- if eq ($name | replace "_" "-") "shutdown-timeout" }}
deployment.engine_args.vllm: {{ $name }} is set by the chart; set drain.seconds, by which the pod's grace period is reckoned{{ end }}
{{- end }}
{{- $engine := include "dflash-serve.engine" . | fromYaml }}
{{- with .Values.autoscaling }}
{{- if ne .kind "none" }}
{{- if lt (int .maxReplicas) (int .minReplicas) }}
autoscaling.maxReplicas: {{ .maxReplicas }} is less than minReplicas {{ .minReplicas }}; raise it{{ end }}
{{- if not $.Values.podMonitor.enabled }}
autoscaling.kind: {{ .kind }} reads the queue from Prometheus, which does not scrape it; set podMonitor.enabled{{ end }}
{{- if and .runningPerReplica (not $engine.running) }}
autoscaling.runningPerReplica: {{ $.Values.backend }} has no gauge of running requests; leave it out{{ end }}
{{- if and .interTokenSeconds (not (and $engine.interTokenLatency (eq .kind "keda"))) }}
autoscaling.interTokenSeconds: needs kind keda, and an engine with a histogram of it; leave it out{{ end }}
{{- if and .headroom (not (and $engine.tokensExpected $engine.tokensGained (eq .kind "keda"))) }}
autoscaling.headroom: needs kind keda, and an engine whose widths our policy chooses (torch, sglang, vllm); leave it out{{ end }}
{{- $width := dig "speculation" "width" "auto" $.Values.deployment | toString }}
{{- if and .headroom (ne $width "auto") }}
autoscaling.headroom: with deployment.speculation.width {{ $width }} no policy chooses widths, and nothing is counted; leave it out{{ end }}
{{- end }}
{{- if ne (eq .kind "keda") (ne .prometheusAddress "") }}
autoscaling.prometheusAddress: {{ .prometheusAddress | quote }} and kind {{ .kind }} do not go together; only keda needs an address such as http://prometheus.monitoring:9090{{ end }}
{{- end }}
{{- if and .Values.alerts.enabled (not .Values.podMonitor.enabled) }}
alerts.enabled: the alerts read metrics that are not scraped; set podMonitor.enabled{{ end }}
{{- end -}}

{{- define "dflash-serve.problems.doors" -}}
{{- if and .Values.secrets.apiKeys.name (not (has "api-key-file" (include "dflash-serve.engine" . | fromYaml).serverFlags)) }}
secrets.apiKeys.name: {{ .Values.backend }} has no API keys; check keys in a gateway before it, or use backend torch, sglang or vllm{{ end }}
{{- if and (ne .Values.service.type "ClusterIP") (not .Values.secrets.apiKeys.name) }}
service.type: {{ .Values.service.type }} opens a server without keys to the world; keep ClusterIP behind a gateway, or set secrets.apiKeys.name{{ end }}
{{- if and .Values.hostNetwork .Values.networkPolicy.enabled }}
hostNetwork: the network policy does not apply to it; set networkPolicy.enabled to false, and guard the nodes' port 8000{{ end }}
{{- if and .Values.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.namespaces) }}
podMonitor.enabled: Prometheus comes from another namespace, and networkPolicy denies it; name it in networkPolicy.namespaces{{ end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker) }}
inferencePool.endpointPicker: none; name the Service of your endpoint picker{{ end }}
{{- with .Values.route }}
{{- if and .enabled (not .gateway) }}
route.gateway: none; name the Gateway of the route{{ end }}
{{- if and .canary.weight (not .canary.service) }}
route.canary.service: none for {{ .canary.weight }} % of the requests; name the Service of the other release{{ end }}
{{- if eq .canary.service (include "dflash-serve.fullname" $) }}
route.canary.service: {{ .canary.service }} is the Service of this release; name the other one{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.environment" -}}
{{- $reserved := list "HOME" "USER" "HF_HOME" "HF_HUB_OFFLINE" "XDG_CACHE_HOME" "HF_TOKEN_PATH" "TIKTOKEN_ENCODINGS_BASE" }}
{{- range .Values.env }}
{{- if or (has .name $reserved) (hasPrefix "LWS_" .name) (hasPrefix "DFLASH_SERVE_" .name) }}
env: {{ .name }} is set by the chart or by `deployment`; leave it out{{ end }}
{{- if or (has .name (list "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN")) (hasPrefix "hf_" (dig "value" "" . | toString)) }}
env: {{ .name }} is a secret; put it into a Secret, and name that in secrets.huggingFaceToken{{ end }}
{{- end }}
{{- range $name, $_ := .Values.podLabels }}
{{- if hasPrefix "app.kubernetes.io/" $name }}
podLabels: {{ $name }} selects the pods of the Service; leave it out{{ end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.tests" -}}
{{- with .Values.tests.acceptance }}
{{- if and .atLeast (or (not (include "dflash-serve.facts" $ | fromYaml).speculates) (gt (include "dflash-serve.maxReplicas" $ | int) 1)) }}
tests.acceptance.atLeast: needs one replica, and a drafter; ask a release of one replica, such as the canary{{ end }}
{{- end }}
{{- if and .Values.tests.verify.schedule (not .Values.tests.verify.enabled) }}
tests.verify.schedule: verify is not enabled, and nothing would run; set tests.verify.enabled{{ end }}
{{- if and .Values.tests.acceptance.schedule (not .Values.tests.acceptance.atLeast) }}
tests.acceptance.schedule: no minimum is given, and nothing would run; set tests.acceptance.atLeast{{ end }}
{{- if and .Values.tests.verify.enabled (not .Values.tests.verify.without) }}
tests.verify.without: none; give the address of the server without speculation, such as http://plain.serving{{ end }}
{{- end -}}
