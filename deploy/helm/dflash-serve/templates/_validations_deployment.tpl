{{- /* What a Deployment asks for that this chart cannot give; each backend's own checks come with `serve`. */ -}}

{{- define "dflash-serve.problems.engine" -}}
{{- $known := .Files.Get "files/engines.yaml" | fromYaml | keys | sortAlpha | join ", " }}
{{- if not (or .Values.engine (include "dflash-serve.isKnown" .)) }}
backend: {{ .Values.backend | quote }} is none that this chart knows ({{ $known }}); give its `engine`, as `dflash-serve deploy --render helm` writes it
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.arguments" -}}
{{- $own := get (.Files.Get "files/arguments.yaml" | fromYaml) .Values.backend | default dict }}
{{- $taken := get $own "always" | default dict }}
{{- if get .Values.deployment "drafter" }}
{{- $taken = merge (get $own "drafter" | default dict) $taken }}
{{- end }}
{{- range $name, $value := dig "engine_args" .Values.backend dict .Values.deployment }}
{{- with get $taken ($name | replace "-" "_") }}
deployment.engine_args.{{ $.Values.backend }}.{{ $name }}: dflash-serve sets it itself; {{ or (contains "." .) (eq . "role") | ternary (printf "set deployment.%s" .) (printf "leave it out: %s" .) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.devices" -}}
{{- $engine := include "dflash-serve.engine" . | fromYaml }}
{{- $facts := include "dflash-serve.facts" . | fromYaml }}
{{- $parallel := get .Values.deployment "parallel" | default dict }}
{{- $tensor := dig "tensor" 1 $parallel | int }}
{{- $expert := dig "expert" 1 $parallel | int }}
{{- $pipeline := dig "pipeline" 1 $parallel | int }}
{{- $context := dig "context" 1 $parallel | int }}
{{- $data := dig "data" 1 $parallel | int }}
{{- $world := mul $tensor $pipeline $context $data }}
{{- if and (eq $facts.gpu "none") $engine.needsGpu }}
deployment.hardware.gpu: {{ .Values.backend }} needs a GPU; name it, or set backend to torch
{{- end }}
{{- if and (eq .Values.backend "torch") (gt ($facts.count | int) 1) }}
deployment.hardware.count: the embedded engine runs on one device, not {{ $facts.count }}; set it to 1 and raise replicas, or use sglang or tensorrt-llm
{{- end }}
{{- if and $engine.needsGpu (ne ($world | int) ($facts.count | int)) }}
deployment.parallel: tensor {{ $tensor }} x pipeline {{ $pipeline }} x context {{ $context }}{{ if gt $data 1 }} x data {{ $data }}{{ end }} = {{ $world }} devices, but hardware.count is {{ $facts.count }}; make them agree
{{- end }}
{{- if and (gt $data 1) (ne .Values.backend "sglang") (include "dflash-serve.isKnown" .) }}
deployment.parallel.data: {{ .Values.backend }} has one copy of the model in a server; set it to 1 and replicas to {{ $data }}, as `dflash-serve deploy --render helm` does
{{- end }}
{{- if mod $tensor $expert }}
deployment.parallel.expert: {{ $expert }} does not divide tensor {{ $tensor }}; experts are shared out among those devices
{{- end }}
{{- if mod ($facts.count | int) ($facts.nodes | int) }}
deployment.parallel.nodes: {{ $facts.count }} devices do not spread evenly over {{ $facts.nodes }} nodes; change one
{{- end }}
{{- $most := hasPrefix "gb" $facts.gpu | ternary 4 8 }}
{{- if gt ($facts.gpusPerPod | int) $most }}
deployment.parallel.nodes: {{ $facts.gpusPerPod }} devices on a node, there are at most {{ $most }}; set it to {{ divf $facts.count $most | ceil }} or more
{{- end }}
{{- with .Values.resources.extra }}
{{- if hasKey . "nvidia.com/gpu" }}
resources.extra: nvidia.com/gpu is counted from deployment.hardware.count; leave it out
{{- end }}
{{- end }}
{{- range $where, $size := dict "resources.memory" (include "dflash-serve.memory" .) "build.memory" .Values.build.memory "sharedMemory" .Values.sharedMemory "scratch" .Values.scratch }}
{{- if not (include "dflash-serve.isQuantity" $size) }}
{{ $where }}: {{ $size | quote }} is no size; write one such as 64Gi
{{- end }}
{{- end }}
{{- $memory := include "dflash-serve.memory" . }}
{{- if and (include "dflash-serve.isQuantity" $memory) (include "dflash-serve.isQuantity" .Values.sharedMemory) }}
{{- if le (include "dflash-serve.bytes" $memory | int64) (include "dflash-serve.bytes" .Values.sharedMemory | int64) }}
resources.memory: {{ $memory }} is all taken by sharedMemory {{ .Values.sharedMemory }}, which counts; ask for more
{{- end }}
{{- end }}
{{- range $where, $cpu := dict "resources.cpu" (include "dflash-serve.cpu" .) "build.cpu" .Values.build.cpu }}
{{- if not (regexMatch "^([1-9][0-9]*m?|[0-9]+\\.[0-9]+)$" (toString $cpu)) }}
{{ $where }}: {{ $cpu | quote }} is no number of CPUs; write one such as "8" or 500m
{{- end }}
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.nodes" -}}
{{- $nodes := (include "dflash-serve.facts" . | fromYaml).nodes | int }}
{{- $role := dig "role" "whole" .Values.deployment }}
{{- if and (gt $nodes 1) (eq .Values.backend "torch") }}
deployment.parallel.nodes: the embedded engine runs on one node, not {{ $nodes }}; set it to 1, or use sglang
{{- end }}
{{- if and (gt $nodes 1) (eq .Values.backend "vllm") }}
deployment.parallel.nodes: vLLM is started on one node, not {{ $nodes }}; set it to 1, or use sglang
{{- end }}
{{- if and (gt $nodes 1) (eq .Values.backend "tensorrt-llm") }}
deployment.parallel.nodes: TensorRT-LLM starts {{ $nodes }} nodes by srun and MPI, which this chart has not; use sglang, or `dflash-serve deploy --render dynamo`
{{- end }}
{{- if ne $role "whole" }}
deployment.role: {{ $role }} is one half of a pair that needs a router between; use `dflash-serve deploy --render dynamo`
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.speculation" -}}
{{- $drafter := get .Values.deployment "drafter" }}
{{- $speculation := get .Values.deployment "speculation" | default dict }}
{{- $width := dig "width" "auto" $speculation | toString }}
{{- $block := dig "block_size" 0 $speculation | default 0 | int }}
{{- $number := regexMatch "^[0-9]+$" $width }}
{{- if not $drafter }}
{{- if and $number (gt (int $width) 1) }}
deployment.drafter: none, but speculation.width is {{ $width }}; name one, or set the width to off
{{- end }}
{{- if $block }}
deployment.drafter: none, but speculation.block_size is {{ $block }}; name one, or leave the size out
{{- end }}
{{- if get $speculation "draft_window" }}
deployment.drafter: none, but speculation.draft_window is set; name one, or leave the window out
{{- end }}
{{- end }}
{{- if and $number $block (gt (int $width) $block) }}
deployment.speculation.width: {{ $width }} is larger than the block of {{ $block }} slots; use 1 to {{ $block }}, auto or off
{{- end }}
{{- end -}}

{{- define "dflash-serve.problems.limits" -}}
{{- $limits := get .Values.deployment "limits" | default dict }}
{{- $batch := dig "max_batch_size" 0 $limits | default 0 | int }}
{{- $rows := dig "max_num_tokens" 0 $limits | default 0 | int }}
{{- $block := dig "speculation" "block_size" 0 .Values.deployment | default 0 | int | max 1 }}
{{- if and $rows (lt $rows (mul $batch $block | int)) }}
deployment.limits.max_num_tokens: {{ $rows }} rows do not hold {{ $batch }} requests of {{ $block }} slots; use {{ mul $batch $block }} or more, or lower max_batch_size
{{- end }}
{{- if and (eq .Values.backend "tensorrt-llm") (hasKey $limits "max_queued_requests") }}
deployment.limits.max_queued_requests: TensorRT-LLM queues without bound; leave it out, and bound the queue at your gateway
{{- end }}
{{- $queue := dig "max_queued_requests" 256 $limits | int }}
{{- if and (include "dflash-serve.scaled" .) (ne .Values.backend "tensorrt-llm") (gt (int .Values.autoscaling.queuedPerReplica) $queue) }}
autoscaling.queuedPerReplica: a queue ends at limits.max_queued_requests {{ $queue }} and never gets to {{ .Values.autoscaling.queuedPerReplica }}; lower it
{{- end }}
{{- end -}}
