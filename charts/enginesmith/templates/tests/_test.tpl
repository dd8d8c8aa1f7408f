{{/* A pod of `helm test`. Argument: {root, name, script, env: text}. */}}
{{- define "enginesmith.test" -}}
{{- $root := .root -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "enginesmith.fullname" $root }}-test-{{ .name }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "enginesmith.podLabels" (list $root "test") | nindent 4 }}
  {{- include "enginesmith.annotations" (list $root (dict "helm.sh/hook" "test" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded")) | nindent 2 }}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 1800
  serviceAccountName: {{ include "enginesmith.serviceAccount" (list $root "builds") | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "enginesmith.pullSecrets" $root | nindent 2 }}
  {{- include "enginesmith.placement" (list $root "test" $root.Values.prefect.flowRuns) | nindent 2 }}
  securityContext:
    {{- include "enginesmith.podSecurity" $root | nindent 4 }}
  containers:
    - name: test
      image: {{ include "enginesmith.image" (list $root "control") | quote }}
      imagePullPolicy: {{ $root.Values.images.control.pullPolicy }}
      command:
        - sh
        - -euc
        - |
          {{- .script | nindent 10 }}
      securityContext:
        {{- include "enginesmith.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "enginesmith.env.base" $root | nindent 8 }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "enginesmith.envFrom" $root | nindent 6 }}
      resources:
        {{- toYaml $root.Values.tests.resources | nindent 8 }}
      volumeMounts:
        {{- include "enginesmith.mounts.base" $root | nindent 8 }}
        - name: selftest
          mountPath: /etc/enginesmith/selftest
          readOnly: true
        {{- include "enginesmith.mounts.registry" $root | nindent 8 }}
        {{- include "enginesmith.mounts.extra" (list $root dict) | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 4Gi
    {{- include "enginesmith.volumes.trust" $root | nindent 4 }}
    - name: selftest
      configMap:
        name: {{ include "enginesmith.fullname" $root }}-test
    {{- include "enginesmith.volumes.registry" $root | nindent 4 }}
    {{- include "enginesmith.volumes.extra" (list $root dict) | nindent 4 }}
{{- end -}}
