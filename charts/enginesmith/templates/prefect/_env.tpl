{{/* Where the Prefect server keeps its state: PostgreSQL, or SQLite below PREFECT_HOME. */}}
{{- define "enginesmith.env.database" -}}
{{- with .Values.prefect.server.postgresql }}
{{- if .existingSecret }}
- name: PREFECT_API_DATABASE_CONNECTION_URL
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where Prefect servers keep what they share beside the database: Redis, or a folder of the only server.
     https://docs.prefect.io/v3/advanced/self-hosted, "Redis setup". */}}
{{- define "enginesmith.env.prefectShared" -}}
{{- with .Values.prefect.server.redis }}
{{- if .existingSecret }}
{{- range $name, $module := dict "PREFECT_SERVER_EVENTS_MESSAGING_BROKER" "messaging" "PREFECT_SERVER_EVENTS_MESSAGING_CACHE" "messaging"
      "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING" "ordering" "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE" "lease_storage"
      "PREFECT_SERVER_WORKER_CHANNEL_CLEANUP_QUEUE_STORAGE" "cleanup_queue" }}
- name: {{ $name }}
  value: prefect_redis.{{ $module }}
{{- end }}
{{- range list "PREFECT_REDIS_MESSAGING_URL" "PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL" "PREFECT_SERVER_DOCKET_URL" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.prefect.server.redis.existingSecret | quote }}
      key: {{ $.Values.prefect.server.redis.key | quote }}
{{- end }}
{{- else }}
# In memory, the default, a restart forgets who holds a GPU generation's slots, and they stay taken.
- name: PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE
  value: prefect.server.concurrency.lease_storage.filesystem
# In memory, it also forgets the events that wait for others, such as a run's end: nothing would start that run again.
- name: PREFECT_SERVER_EVENTS_CAUSAL_ORDERING
  value: prefect.server.events.ordering.db
{{- end }}
{{- end }}
{{- if gt (int .Values.prefect.server.replicas) 1 }}
# A hook does it, once.
- name: PREFECT_SERVER_DATABASE_MIGRATE_ON_START
  value: "false"
{{- end }}
{{- end -}}

{{/* Environment of the Prefect worker alone. */}}
{{- define "enginesmith.env.prefectWorker" -}}
- name: PREFECT_WORKER_WEBSERVER_HOST
  value: 0.0.0.0
- name: PREFECT_WORKER_WEBSERVER_PORT
  value: "8080"
# This namespace alone: the default watches the whole cluster, and reads kube-system for its identity.
- name: PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES
  value: {{ .Release.Namespace | quote }}
- name: PREFECT_INTEGRATIONS_KUBERNETES_CLUSTER_UID
  value: {{ include "enginesmith.clusterUid" . | quote }}
{{- if and .Values.prefect.server.enabled .Values.prefect.server.auth.existingSecret }}
- name: PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME
  value: {{ .Values.prefect.server.auth.existingSecret | quote }}
- name: PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_KEY
  value: {{ .Values.prefect.server.auth.key | quote }}
{{- end }}
{{- if and (not .Values.prefect.server.enabled) .Values.prefect.externalApi.existingSecret }}
- name: PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_KEY_SECRET_NAME
  value: {{ .Values.prefect.externalApi.existingSecret | quote }}
- name: PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_KEY_SECRET_KEY
  value: {{ .Values.prefect.externalApi.key | quote }}
{{- end }}
{{- end -}}

{{/* Waits until Prefect's API answers: what is started beside the server would fail before it is up.
     Argument: (list $ extraEnv); a proxy or a CA on the way to an external API is in the way of this, too. */}}
{{- define "enginesmith.waitForPrefect" -}}
{{- $root := index . 0 -}}
- name: wait-for-prefect
  image: {{ include "enginesmith.image" (list $root "control") | quote }}
  imagePullPolicy: {{ $root.Values.images.control.pullPolicy }}
  command:
    - python
    - -c
    - |
      import os, ssl, sys, time, urllib.error, urllib.request
      url, end = os.environ["PREFECT_API_URL"] + "/health", time.monotonic() + 600
      context = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE"))
      while time.monotonic() < end:
          try:
              urllib.request.urlopen(url, timeout=5, context=context).close()
              sys.exit(0)
          except urllib.error.HTTPError as error:
              if error.code < 500:
                  sys.exit(0)  # it answers; whether it knows us is seen next
              reason = error
          except OSError as error:
              reason = error
          print(f"{url}: {reason}; trying again", flush=True)
          time.sleep(5)
      sys.exit(f"{url} did not answer within 10 minutes; see the logs of the Prefect server")
  securityContext:
    {{- include "enginesmith.containerSecurity" $root | nindent 4 }}
  env:
    {{- include "enginesmith.env.base" $root | nindent 4 }}
    - name: PREFECT_API_URL
      value: {{ include "enginesmith.prefectApi" $root | quote }}
    {{- with $root.Values.prefect.externalApi.caBundle }}
    {{- if .configMap }}
    - name: PREFECT_API_SSL_CERT_FILE
      value: /etc/enginesmith/prefect-ca/{{ .key }}
    {{- end }}
    {{- end }}
    {{- with index . 1 }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    {{- include "enginesmith.mounts.base" $root | nindent 4 }}
    {{- include "enginesmith.mounts.prefect" $root | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 128Mi}
{{- end -}}
