{{- define "dflash-serve.capabilities" -}}
{a100: "8.0", l40s: "8.9", h100: "9.0", h200: "9.0", b200: "10.0", b300: "10.3", gb200: "10.0", gb300: "10.3",
  rtx-pro-6000: "12.0", rtx-5090: "12.0", rtx-6000d: "12.0", gb10: "12.1"}
{{- end -}}

{{- /* MiB by which GPUs of one capability differ, as nvidia.com/gpu.memory has them. */ -}}
{{- define "dflash-serve.memories" -}}
{h100: [Lt 120000], h200: [Gt 120000], rtx-5090: [Lt 40000], rtx-6000d: [Gt 40000, Lt 92000], rtx-pro-6000: [Gt 92000]}
{{- end -}}

{{- /* arm64 for Grace (gb200, gb300, gb10); empty if no GPU is named. */ -}}
{{- define "dflash-serve.architecture" -}}
{{- $gpu := (include "dflash-serve.facts" . | fromYaml).gpu -}}
{{- .Values.placement.architecture | default (hasPrefix "gb" $gpu | ternary "arm64" (has $gpu (list "" "none") | ternary "" "amd64")) -}}
{{- end -}}

{{- define "dflash-serve.computeCapability" -}}
{{- $known := include "dflash-serve.capabilities" . | fromYaml -}}
{{- .Values.placement.computeCapability | default (get $known (include "dflash-serve.facts" . | fromYaml).gpu) -}}
{{- end -}}

{{- /* Name of the GPU in a build's key. */ -}}
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
{{- if not .Values.placement.computeCapability }}
{{- range get (include "dflash-serve.memories" . | fromYaml) $gpu | default list }}
- {key: nvidia.com/gpu.memory, operator: {{ regexFind "^.t" . }}, values: [{{ regexFind "[0-9]+" . | quote }}]} # MiB
{{- end }}
{{- end }}
{{- end -}}
{{- if or .Values.placement.products (include "dflash-serve.computeCapability" .) }}
- {key: nvidia.com/gpu.slices.gi, operator: DoesNotExist} # no MIG slices under the name of whole GPUs
{{- end }}
{{ include "dflash-serve.imageNodes" . }}
{{- end -}}

{{- /* Node label of the image's architecture. */ -}}
{{- define "dflash-serve.imageNodes" -}}
{{- with include "dflash-serve.architecture" . }}
- {key: kubernetes.io/arch, operator: In, values: [{{ . }}]}
{{- end }}
{{- end -}}

{{- /* dict "root" $ "gpus" n "component" name */ -}}
{{- define "dflash-serve.placement" -}}
{{- $root := .root -}}
{{- with $root.Values.placement.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $root.Values.placement.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $root.Values.placement.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with $root.Values.placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $nodes := include (gt (int .gpus) 0 | ternary "dflash-serve.gpuNodes" "dflash-serve.imageNodes") $root | trim -}}
{{- $topology := $root.Values.placement.topology -}}
{{- $together := and $topology.key (not $topology.exclusive) (has .component (list "server" "worker")) -}}
{{- if or $nodes $together }}
affinity:
  {{- if $nodes }}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            {{- $nodes | nindent 12 }}
  {{- end }}
  {{- if $together }}
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: {{ $topology.key | quote }}
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
