{{/* The RayCluster. Not a template of its own: it is a ConfigMap's content, and pipeline/orchestration/kuberay applies it. */}}
{{- define "enginesmith.ray.cluster" -}}
{{- $gpus := .Files.Get "files/gpus.yaml" | fromYaml -}}
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: {{ include "enginesmith.rayCluster" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- include "enginesmith.labels" (list . "ray") | nindent 4 }}
    {{- with .Values.kueue.queueName }}
    kueue.x-k8s.io/queue-name: {{ . | quote }}
    {{- end }}
    {{- with .Values.kueue.priorityClass }}
    kueue.x-k8s.io/priority-class: {{ . | quote }}
    {{- end }}
  {{- include "enginesmith.annotations" (list . (ternary (dict "kueue.x-k8s.io/elastic-job" "true") dict (ne .Values.kueue.queueName ""))) | nindent 2 }}
spec:
  rayVersion: {{ .Values.ray.version | quote }}
  enableInTreeAutoscaling: true
  authOptions:
    mode: token
  {{- with .Values.ray.gcsFaultTolerance }}
  {{- if .redisAddress }}
  gcsFaultToleranceOptions:
    redisAddress: {{ .redisAddress | quote }}
    # What one version of Ray wrote is not for another.
    externalStorageNamespace: {{ printf "%s-%s-%s" $.Release.Namespace (include "enginesmith.rayCluster" $) $.Values.ray.version | quote }}
    {{- with .username }}
    redisUsername:
      value: {{ . | quote }}
    {{- end }}
    {{- if .existingSecret }}
    redisPassword:
      valueFrom:
        secretKeyRef:
          name: {{ .existingSecret | quote }}
          key: {{ .key | quote }}
    {{- end }}
  {{- end }}
  {{- end }}
  autoscalerOptions:
    version: v2
    upscalingMode: {{ .Values.ray.autoscaler.upscalingMode }}
    idleTimeoutSeconds: {{ .Values.ray.autoscaler.idleTimeoutSeconds | int64 }}
    image: {{ include "enginesmith.image" (list . "control") | quote }}
    imagePullPolicy: {{ .Values.images.control.pullPolicy }}
    securityContext:
      {{- include "enginesmith.containerSecurity" . | nindent 6 }}
    env:
      {{- include "enginesmith.env.base" . | nindent 6 }}
    resources:
      {{- toYaml .Values.ray.autoscaler.resources | nindent 6 }}
    # The operator mounts /tmp/ray alone, and the rest of its file system is read-only.
    volumeMounts:
      {{- include "enginesmith.mounts.base" . | nindent 6 }}
  headGroupSpec:
    serviceType: ClusterIP
    rayStartParams:
      num-cpus: "0"
      dashboard-host: 0.0.0.0
    template:
      metadata:
        labels:
          {{- include "enginesmith.podLabels" (list . "ray-head") | nindent 10 }}
        annotations:
          {{- include "enginesmith.ray.annotations" (list . .Values.ray.head "control") | nindent 10 }}
      spec:
        {{- with .Values.serviceAccounts.rayHead.name }}
        serviceAccountName: {{ . | quote }}
        {{- end }}
        # The autoscaler beside the head reads pods and writes the RayCluster.
        automountServiceAccountToken: true
        restartPolicy: Never
        enableServiceLinks: false
        {{- include "enginesmith.pullSecrets" . | nindent 8 }}
        {{- include "enginesmith.placement" (list . "ray-head" .Values.ray.head) | nindent 8 }}
        securityContext:
          {{- include "enginesmith.podSecurity" . | nindent 10 }}
        containers:
          - name: ray-head
            image: {{ include "enginesmith.image" (list . "control") | quote }}
            imagePullPolicy: {{ .Values.images.control.pullPolicy }}
            securityContext:
              {{- include "enginesmith.containerSecurity" . | nindent 14 }}
            env:
              {{- include "enginesmith.env.base" . | nindent 14 }}
              {{- include "enginesmith.env.extra" (list (dict "Values" dict) .Values.ray.head) | nindent 14 }}
            ports:
              - {name: gcs, containerPort: 6379, protocol: TCP}
              - {name: dashboard, containerPort: 8265, protocol: TCP}
              - {name: client, containerPort: 10001, protocol: TCP}
              - {name: metrics, containerPort: 8080, protocol: TCP}
            resources:
              {{- toYaml .Values.ray.head.resources | nindent 14 }}
            volumeMounts:
              {{- include "enginesmith.mounts.base" . | nindent 14 }}
              {{- include "enginesmith.mounts.extra" (list (dict "Values" dict) .Values.ray.head) | nindent 14 }}
          {{- include "enginesmith.sidecars" .Values.ray.head | nindent 10 }}
        volumes:
          {{- include "enginesmith.scratch" .Values.ray.head.scratch | nindent 10 }}
          {{- include "enginesmith.volumes.trust" . | nindent 10 }}
          {{- include "enginesmith.volumes.extra" (list (dict "Values" dict) .Values.ray.head) | nindent 10 }}
  workerGroupSpecs:
    {{- with .Values.cpuGroup }}
    {{- if .enabled }}
    - groupName: cpu
      {{- include "enginesmith.ray.scale" . | nindent 6 }}
      idleTimeoutSeconds: {{ .idleTimeoutSeconds | int64 }}
      rayStartParams: {}
      template:
        {{- $group := merge (dict "name" "cpu") . }}
        {{- include "enginesmith.ray.worker" (dict "root" $ "group" $group "gpus" false "nodeSelector" dict "affinity" .affinity) | nindent 8 }}
    {{- end }}
    {{- end }}
    {{- range .Values.gpuGroups }}
    {{- $group := include "enginesmith.ray.gpuGroup" (list $ .) | fromJson }}
    {{- $generation := index $gpus $group.generation }}
    {{- $labels := ternary $generation.labels dict $group.gpuLabels }}
    {{- $affinity := include "enginesmith.ray.affinity" (dict "products" $generation.products "group" $group) | fromJson }}
    - groupName: {{ $group.name | quote }}
      {{- include "enginesmith.ray.scale" $group | nindent 6 }}
      idleTimeoutSeconds: {{ $group.idleTimeoutSeconds | int64 }}
      # What Enginesmith asks Ray for: builders/execution/ray places a unit by these labels.
      labels:
        enginesmith/sm: {{ $group.generation | quote }}
        {{- with $group.product }}
        enginesmith/product: {{ . | quote }}
        {{- end }}
      {{- if and (eq $group.gpuResource "nvidia.com/gpu") (not $group.resourceClaimTemplate) }}
      rayStartParams: {}
      {{- else }}
      # Ray counts no GPU in a resource of another name, nor in a claim.
      rayStartParams:
        num-gpus: {{ $group.gpusPerWorker | int64 | quote }}
      {{- end }}
      template:
        {{- include "enginesmith.ray.worker" (dict "root" $ "group" $group "gpus" true "nodeSelector" $labels "affinity" $affinity) | nindent 8 }}
    {{- end }}
{{- end -}}
