{{/* Of the nodes' caches. */}}
{{- define "enginesmith.problems.nodeCache" -}}
{{- if .Values.nodeCache.enabled -}}
{{- if not .Values.nodeCache.pulls }}
nodeCache.enabled is true and nodeCache.pulls is empty: there is nothing to follow; name channels and targets
{{- end }}
{{- if and .Values.registry.existingClaim .Values.nodeCache.namespace (ne .Values.nodeCache.namespace .Release.Namespace) }}
nodeCache.namespace: the claim of registry.existingClaim is in {{ .Release.Namespace }}, and pods of {{ .Values.nodeCache.namespace }} cannot mount it; leave nodeCache.namespace empty
{{- end }}
{{- if not .Values.nodeCache.existingClaim }}
{{- $place := .Values.nodeCache.hostPath }}
{{- if not (and (regexMatch "^/(mnt|srv|data)/.|^/(var/lib|var/cache|opt)/enginesmith([/._-]|$)" $place) (not (hasPrefix "/mnt/stateful_partition" $place))) }}
nodeCache.hostPath: {{ $place }} is not a folder of the cache alone, and its owner would be changed on every node; give one below /mnt, /srv, /data, or /var/lib/enginesmith, /var/cache/enginesmith or /opt/enginesmith, or a claim as nodeCache.existingClaim
{{- end }}
{{- if not .Values.podSecurity.runAsUser }}
nodeCache.hostPath: the cluster chooses the user of the pods (podSecurity.runAsUser is null), so the folder could not be made theirs; give nodeCache.existingClaim, or podSecurity.runAsUser
{{- end }}
{{- end }}
{{- $names := list -}}
{{- range .Values.nodeCache.pulls }}
{{- if has .name $names }}
nodeCache.pulls: {{ .name }} is there twice; rename one
{{- end }}
{{- $names = append $names .name }}
{{- if not (contains ":" .reference) }}
nodeCache.pulls.{{ .name }}: {{ .reference | quote }} is not a channel; only channels can be followed; give NAME:CHANNEL
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}
