{{/* What the user adds to every pod that builds, proves, reads the registry or registers flows (`extra...`), and to those of one
     component or group. What these say of the same name takes the place of what all have. */}}

{{/* Two lists as one, as JSON. Argument: (list entries-of-all entries-of-the-group key). */}}
{{- define "enginesmith.over" -}}
{{- $key := index . 2 -}}
{{- $own := index . 1 | default list -}}
{{- $names := list -}}
{{- range $own }}{{ $names = append $names (get . $key) }}{{ end -}}
{{- $found := list -}}
{{- range index . 0 }}{{ if not (has (get . $key) $names) }}{{ $found = append $found . }}{{ end }}{{ end -}}
{{- toJson (concat $found $own) -}}
{{- end -}}

{{/* As YAML: environment, mounts, volumes. Argument: (list $ group), where the group may be empty; a pod that has nothing
     of what all have gives (dict "Values" dict) as $. */}}
{{- define "enginesmith.env.extra" -}}
{{- with include "enginesmith.over" (list (index . 0).Values.extraEnv (index . 1).extraEnv "name") | fromJsonArray }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "enginesmith.mounts.extra" -}}
{{- with include "enginesmith.over" (list (index . 0).Values.extraVolumeMounts (index . 1).extraVolumeMounts "mountPath") | fromJsonArray }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "enginesmith.volumes.extra" -}}
{{- with include "enginesmith.over" (list (index . 0).Values.extraVolumes (index . 1).extraVolumes "name") | fromJsonArray }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Secrets and ConfigMaps whose keys become environment variables: a field of a container, or nothing. */}}
{{- define "enginesmith.envFrom" -}}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The user's containers as JSON, restricted unless they say otherwise. Argument: the list. */}}
{{- define "enginesmith.containers" -}}
{{- $security := include "enginesmith.containerSecurity" . | fromYaml -}}
{{- $found := list -}}
{{- range . -}}
{{- $found = append $found (merge (dict "securityContext" (mergeOverwrite (deepCopy $security) (.securityContext | default dict))) .) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Containers beside a component's own. Argument: its values. */}}
{{- define "enginesmith.sidecars" -}}
{{- with include "enginesmith.containers" .extraContainers | fromJsonArray }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Topology spread constraints; without a selector of theirs, over the pods with some labels. Argument: (list labels constraints). */}}
{{- define "enginesmith.spread" -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (index . 0 | fromYaml)) }}
{{- with index . 1 }}
topologySpreadConstraints:
{{- range . }}
  - {{- toYaml (ternary . (merge (dict) . $own) (hasKey . "labelSelector")) | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}
