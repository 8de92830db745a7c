{{- define "dflash-serve.computeCapability" -}}
{{- $known := dict "h100" "9.0" "h200" "9.0" "b200" "10.0" "b300" "10.3" "gb200" "10.0" "gb300" "10.3" -}}
{{- .Values.placement.computeCapability | default (get $known (include "dflash-serve.facts" . | fromYaml).gpu) -}}
{{- end -}}

{{- /* What the GPU is called here: part of a build's key. */ -}}
{{- define "dflash-serve.gpuKind" -}}
{{- .Values.placement.products | sortAlpha | join " " | default (include "dflash-serve.computeCapability" .) -}}
{{- end -}}

{{- /* Expressions over the labels of NVIDIA's feature discovery. */ -}}
{{- define "dflash-serve.gpuNodes" -}}
{{- $gpu := (include "dflash-serve.facts" . | fromYaml).gpu -}}
{{- if .Values.placement.products -}}
- key: nvidia.com/gpu.product
  operator: In
  values: {{ .Values.placement.products | toJson }}
{{- else if include "dflash-serve.computeCapability" . -}}
{{- $capability := include "dflash-serve.computeCapability" . | splitList "." -}}
- {key: nvidia.com/gpu.compute.major, operator: In, values: [{{ index $capability 0 | quote }}]}
- {key: nvidia.com/gpu.compute.minor, operator: In, values: [{{ index $capability 1 | quote }}]}
{{- if and (has $gpu (list "h100" "h200")) (not .Values.placement.computeCapability) }}
- {key: nvidia.com/gpu.memory, operator: {{ eq $gpu "h200" | ternary "Gt" "Lt" }}, values: ["120000"]} # MiB; both are 9.0
{{- end }}
{{- end -}}
{{- end -}}

{{- /* dict "root" $ "gpus" n "component" name */ -}}
{{- define "dflash-serve.placement" -}}
{{- $root := .root -}}
{{- with $root.Values.placement.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.placement.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $root.Values.placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $nodes := include "dflash-serve.gpuNodes" $root -}}
{{- $topology := $root.Values.placement.topology -}}
{{- $together := and $topology.key (not $topology.exclusive) (ne .component "build") -}}
{{- if or (and .gpus $nodes) $together }}
affinity:
  {{- if and .gpus $nodes }}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            {{- $nodes | nindent 12 }}
  {{- end }}
  {{- if $together }}
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: {{ $topology.key }}
        labelSelector:
          matchLabels:
            {{- include "dflash-serve.selector" $root | nindent 12 }}
          matchExpressions:
            - {key: app.kubernetes.io/component, operator: In, values: [server, worker]}
        matchLabelKeys: [leaderworkerset.sigs.k8s.io/group-key] # those of its own replica
  {{- end }}
{{- end }}
{{- if eq .component "server" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "dflash-serve.selector" $root | nindent 8 }}
        app.kubernetes.io/component: server
{{- end }}
{{- end -}}
