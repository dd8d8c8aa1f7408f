{{/* What every pod has in common. Nothing here may depend on the chart's version. */}}

{{/* Security context of a pod, as Pod Security "restricted" wants it. */}}
{{- define "enginesmith.podSecurity" -}}
runAsNonRoot: true
{{- range $field := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- $number := get $.Values.podSecurity $field }}
{{- if $number }}
{{ $field }}: {{ $number | int64 }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Security context of a container, as Pod Security "restricted" wants it. */}}
{{- define "enginesmith.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Pull secrets of a pod. */}}
{{- define "enginesmith.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where a pod may run. Argument: (list $ component values-of-the-component). */}}
{{- define "enginesmith.placement" -}}
{{- $values := index . 2 }}
{{- with $values.nodeSelector }}
nodeSelector:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- include "enginesmith.spread" (list (include "enginesmith.selector" .) $values.topologySpreadConstraints) }}
{{- end -}}

{{/* Environment of everything: the root file system is read-only, so all that is written goes to /tmp; the way out. */}}
{{- define "enginesmith.env.base" -}}
- name: HOME
  value: /tmp
- name: TMPDIR
  value: /tmp
- name: DO_NOT_TRACK
  value: "1"
{{- with .Values.proxy }}
{{- range $name, $url := dict "HTTP_PROXY" .http "HTTPS_PROXY" .https }}
{{- if $url }}
- name: {{ $name | quote }}
  value: {{ $url | quote }}
{{- end }}
{{- end }}
{{- if or .http .https }}
{{- $full := include "enginesmith.fullname" $ }}
{{- $own := list "localhost" "127.0.0.1" ".svc" ".cluster.local" "$(KUBERNETES_SERVICE_HOST)" (printf "%s-prefect-server" $full) (printf "%s-ray-head-svc" $full) }}
- name: NO_PROXY
  value: {{ concat $own .except | join "," | quote }}
{{- end }}
{{- end }}
{{- if .Values.caBundle.configMap }}
{{- /* The registry's own bundle is over this one. */}}
{{- $registry := ternary (include "enginesmith.caBundleVariable" .) "" (ne .Values.registry.caBundle.configMap "") }}
{{- range without (list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "AWS_CA_BUNDLE") $registry }}
- name: {{ . | quote }}
  value: /etc/enginesmith/trust/{{ $.Values.caBundle.key }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of everything: scratch space, the authorities to trust. */}}
{{- define "enginesmith.mounts.base" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.caBundle.configMap }}
- name: trust
  mountPath: /etc/enginesmith/trust
  readOnly: true
{{- end }}
{{- end -}}

{{- define "enginesmith.volumes.base" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{ include "enginesmith.volumes.trust" . }}
{{- end -}}

{{- define "enginesmith.volumes.trust" -}}
{{- with .Values.caBundle.configMap }}
- name: trust
  configMap:
    name: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Environment of what reads or writes the registry. */}}
{{- define "enginesmith.env.registry" -}}
- name: ENGINESMITH_REGISTRY
  value: {{ include "enginesmith.registry" . | quote }}
{{- if .Values.registry.existingSecret }}
{{- range ternary (list "AZURE_STORAGE_KEY") (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY") (eq .Values.registry.scheme "az") }}
- name: {{ . | quote }}
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.registry.existingSecret | quote }}
      key: {{ . | quote }}
{{- end }}
{{- end }}
{{- if .Values.registry.caBundle.configMap }}
- name: {{ include "enginesmith.caBundleVariable" . | quote }}
  value: /etc/enginesmith/ca/{{ .Values.registry.caBundle.key }}
{{- end }}
{{- end -}}

{{/* The same for what only reads it. */}}
{{- define "enginesmith.env.registryRead" -}}
{{- $values := deepCopy .Values -}}
{{- with $values.registry.readSecret }}{{ $_ := set $values.registry "existingSecret" . }}{{ end -}}
{{- include "enginesmith.env.registry" (dict "Values" $values) }}
{{- end -}}

{{/* Environment of Prefect's clients. */}}
{{- define "enginesmith.env.prefect" -}}
- name: PREFECT_API_URL
  value: {{ include "enginesmith.prefectApi" . | quote }}
- name: PREFECT_HOME
  value: /tmp/prefect
- name: PREFECT_SERVER_ANALYTICS_ENABLED
  value: "false"
{{- with .Values.prefect.externalApi.caBundle }}
{{- if .configMap }}
- name: PREFECT_API_SSL_CERT_FILE
  value: /etc/enginesmith/prefect-ca/{{ .key }}
{{- end }}
{{- end }}
{{- with .Values.prefect.logLevel }}
- name: PREFECT_LOGGING_LEVEL
  value: {{ . | quote }}
{{- end }}
{{- if and .Values.prefect.server.enabled .Values.prefect.server.auth.existingSecret }}
- name: PREFECT_API_AUTH_STRING
  valueFrom:
    secretKeyRef:
      name: {{ .Values.prefect.server.auth.existingSecret | quote }}
      key: {{ .Values.prefect.server.auth.key | quote }}
{{- end }}
{{- if and (not .Values.prefect.server.enabled) .Values.prefect.externalApi.existingSecret }}
- name: PREFECT_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.prefect.externalApi.existingSecret | quote }}
      key: {{ .Values.prefect.externalApi.key | quote }}
{{- end }}
{{- end -}}

{{/* Environment of Ray's clients: the token is in the Secret that the operator makes for the cluster. */}}
{{- define "enginesmith.env.ray" -}}
- name: RAY_ADDRESS
  value: {{ include "enginesmith.rayAddress" . | quote }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "enginesmith.rayCluster" . | quote }}
      key: auth_token
{{- end -}}

{{/* Mounts and volumes of what reads or writes the registry. */}}
{{- define "enginesmith.mounts.registry" -}}
{{- if .Values.registry.existingClaim }}
- name: registry
  mountPath: /registry
{{- end }}
{{- if .Values.registry.caBundle.configMap }}
- name: ca
  mountPath: /etc/enginesmith/ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "enginesmith.mounts.registryRead" -}}
{{- include "enginesmith.mounts.registry" . | replace "mountPath: /registry" "mountPath: /registry\n  readOnly: true" }}
{{- end -}}

{{/* Mounts and volumes of Prefect's clients. */}}
{{- define "enginesmith.mounts.prefect" -}}
{{- if .Values.prefect.externalApi.caBundle.configMap }}
- name: prefect-ca
  mountPath: /etc/enginesmith/prefect-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "enginesmith.volumes.prefect" -}}
{{- with .Values.prefect.externalApi.caBundle.configMap }}
- name: prefect-ca
  configMap:
    name: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "enginesmith.volumes.registry" -}}
{{- if .Values.registry.existingClaim }}
- name: registry
  persistentVolumeClaim:
    claimName: {{ .Values.registry.existingClaim | quote }}
{{- end }}
{{- if .Values.registry.caBundle.configMap }}
- name: ca
  configMap:
    name: {{ .Values.registry.caBundle.configMap | quote }}
{{- end }}
{{- end -}}

{{/* Scratch space at /tmp: on the node's disk, or a volume of a storage class that lives as long as the pod.
     Argument: {size, storageClass}. */}}
{{- define "enginesmith.scratch" -}}
- name: tmp
{{- if .storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .storageClass | quote }}
        resources:
          requests:
            storage: {{ .size | quote }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .size | quote }}
{{- end }}
{{- end -}}
