{{/* A pod of `helm test`. Argument: {root, name, script, env: text}. */}}
{{- define "enginery.test" -}}
{{- $root := .root -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "enginery.fullname" $root }}-test-{{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "enginery.podLabels" (list $root "test") | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 1800
  serviceAccountName: {{ include "enginery.serviceAccount" (list $root "builds") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "enginery.pullSecrets" $root | nindent 2 }}
  {{- include "enginery.placement" $root.Values.prefect.flowRuns | nindent 2 }}
  securityContext:
    {{- include "enginery.podSecurity" $root | nindent 4 }}
  containers:
    - name: test
      image: {{ include "enginery.image" (list $root "control") }}
      imagePullPolicy: {{ $root.Values.images.control.pullPolicy }}
      command:
        - sh
        - -euc
        - |
          {{- .script | nindent 10 }}
      securityContext:
        {{- include "enginery.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "enginery.env.base" $root | nindent 8 }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "enginery.envFrom" $root | nindent 6 }}
      resources:
        {{- toYaml $root.Values.tests.resources | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: selftest
          mountPath: /etc/enginery/selftest
          readOnly: true
        {{- include "enginery.mounts.registry" $root | nindent 8 }}
        {{- include "enginery.mounts.extra" (list $root dict) | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 4Gi
    - name: selftest
      configMap:
        name: {{ include "enginery.fullname" $root }}-test
    {{- include "enginery.volumes.registry" $root | nindent 4 }}
    {{- include "enginery.volumes.extra" (list $root dict) | nindent 4 }}
{{- end -}}
