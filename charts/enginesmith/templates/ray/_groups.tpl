{{/* The worker groups of the RayCluster. */}}

{{/* How many workers there may be; how many there are is the autoscaler's to say (pipeline/orchestration/kuberay keeps its number).
     Argument: {min, max}. */}}
{{- define "enginesmith.ray.scale" -}}
minReplicas: {{ .min | int64 }}
maxReplicas: {{ .max | int64 }}
replicas: {{ .min | int64 }}
{{- end -}}

{{/* Annotations of a pod of Ray; the user's are over these. A build that is moved is a build that starts again.
     Admission may write another image than the chart's. Argument: (list $ values-of-the-head-or-group name-of-the-image). */}}
{{- define "enginesmith.ray.annotations" -}}
{{- $own := dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" "enginesmith.io/ray-version" (first .).Values.ray.version
      "enginesmith.io/image" (include "enginesmith.image" (list (first .) (last .))) -}}
{{- toYaml (merge (dict) ((index . 1).podAnnotations | default dict) $own) -}}
{{- end -}}

{{/* One worker's pod. Argument: {root, component, group: the values, gpus: bool}. */}}
{{- define "enginesmith.ray.worker" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $claim := ternary $group.resourceClaimTemplate "" .gpus -}}
{{- $device := and .gpus (not $claim) -}}
metadata:
  labels:
    {{- include "enginesmith.podLabels" (list $root "ray-worker") | nindent 4 }}
    enginesmith.io/group: {{ $group.name | quote }}
  annotations:
    {{- include "enginesmith.ray.annotations" (list $root $group (ternary "worker" "control" .gpus)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "enginesmith.serviceAccount" (list $root "builds") | quote }}
  automountServiceAccountToken: false
  restartPolicy: Never
  enableServiceLinks: false
  terminationGracePeriodSeconds: 120
  {{- include "enginesmith.pullSecrets" $root | nindent 2 }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with merge (dict) $group.nodeSelector .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $labels := printf "%s\nenginesmith.io/group: %q" (include "enginesmith.selector" (list $root "ray-worker")) $group.name }}
  {{- include "enginesmith.spread" (list $labels $group.topologySpreadConstraints) | nindent 2 }}
  securityContext:
    {{- include "enginesmith.podSecurity" $root | nindent 4 }}
  {{- with include "enginesmith.containers" $root.Values.extraInitContainers | fromJsonArray }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "enginesmith.image" (list $root (ternary "worker" "control" .gpus)) | quote }}
      imagePullPolicy: {{ index $root.Values.images (ternary "worker" "control" .gpus) "pullPolicy" }}
      securityContext:
        {{- include "enginesmith.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "enginesmith.env.base" $root | nindent 8 }}
        {{- include "enginesmith.env.registry" $root | nindent 8 }}
        - name: ENGINESMITH_CACHE
          value: {{ ternary "/cache" "/tmp/cache" $root.Values.ray.sharedCache.enabled }}
        {{- include "enginesmith.env.extra" (list $root $group) | nindent 8 }}
      {{- include "enginesmith.envFrom" $root | nindent 6 }}
      resources:
        requests:
          cpu: {{ $group.cpu | quote }}
          memory: {{ $group.memory | quote }}
          {{- if $device }}
          {{ $group.gpuResource }}: {{ $group.gpusPerWorker | int64 | quote }}
          {{- end }}
        limits:
          cpu: {{ $group.cpu | quote }}
          memory: {{ $group.memory | quote }}
          {{- if $device }}
          {{ $group.gpuResource }}: {{ $group.gpusPerWorker | int64 | quote }}
          {{- end }}
        {{- if $claim }}
        claims:
          - name: gpu
        {{- end }}
      volumeMounts:
        {{- include "enginesmith.mounts.base" $root | nindent 8 }}
        {{- if $root.Values.ray.sharedCache.enabled }}
        - name: cache
          mountPath: /cache
        {{- end }}
        {{- include "enginesmith.mounts.registry" $root | nindent 8 }}
        {{- include "enginesmith.mounts.extra" (list $root $group) | nindent 8 }}
    {{- include "enginesmith.sidecars" $group | nindent 4 }}
  {{- with $claim }}
  resourceClaims:
    - name: gpu
      resourceClaimTemplateName: {{ . | quote }}
  {{- end }}
  volumes:
    {{- include "enginesmith.scratch" $group.scratch | nindent 4 }}
    {{- include "enginesmith.volumes.trust" $root | nindent 4 }}
    {{- if $root.Values.ray.sharedCache.enabled }}
    - name: cache
      persistentVolumeClaim:
        claimName: {{ include "enginesmith.sharedCache" $root | quote }}
    {{- end }}
    {{- include "enginesmith.volumes.registry" $root | nindent 4 }}
    {{- include "enginesmith.volumes.extra" (list $root $group) | nindent 4 }}
{{- end -}}

{{/* A GPU group's values over the defaults of all. Argument: (list $ group). */}}
{{- define "enginesmith.ray.gpuGroup" -}}
{{- mergeOverwrite (deepCopy (index . 0).Values.gpuGroupDefaults) (index . 1) | toJson -}}
{{- end -}}

{{/* Affinity of a GPU group: the user's, and of those nodes the ones whose product label is one of the product's. Terms are
     alternatives, so each gets the expression. Argument: {products, group}. */}}
{{- define "enginesmith.ray.affinity" -}}
{{- $affinity := deepCopy (.group.affinity | default dict) -}}
{{- if and .group.gpuLabels .group.product -}}
{{- $wanted := dict "key" "nvidia.com/gpu.product" "operator" "In" "values" (index .products .group.product) -}}
{{- $node := get $affinity "nodeAffinity" | default dict -}}
{{- $required := get $node "requiredDuringSchedulingIgnoredDuringExecution" | default (dict "nodeSelectorTerms" (list dict)) -}}
{{- $terms := list -}}
{{- range $required.nodeSelectorTerms -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (.matchExpressions | default list) $wanted)) .) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- toJson $affinity -}}
{{- end -}}
