{{- /* KubeRay makes names and labels from the RayCluster's name, so it has at most 40 characters. A longer one is cut, and
ends in a hash: two long release names may differ in their last characters alone. */ -}}
{{- define "coatcheck.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if gt (len $full) 40 }}{{ printf "%s-%s" ($full | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 8) }}
{{- else }}{{ $full }}{{ end -}}
{{- end }}

{{- /* A version may have a "+", which no label may. */ -}}
{{- define "coatcheck.labels" -}}
app.kubernetes.io/name: coatcheck
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end }}

{{- /* The chart's labels with those of `more`, which replace the chart's of the same name. */ -}}
{{- define "coatcheck.labelsWith" -}}
{{- mergeOverwrite (include "coatcheck.labels" .root | fromYaml) (deepCopy (default dict .more)) | toYaml }}
{{- end }}

{{- /* The labels that the KubeRay operator puts on the pods of a worker group. */ -}}
{{- define "coatcheck.pods" -}}
ray.io/cluster: {{ include "coatcheck.name" .root }}
ray.io/group: {{ .group }}
{{- end }}

{{- define "coatcheck.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}
{{- else }}:{{ default (.Chart.AppVersion | replace "+" "_") .Values.image.tag }}{{ end }}
{{- end }}

{{- define "coatcheck.serviceAccount" -}}
{{ if .Values.serviceAccount.create }}{{ default (include "coatcheck.name" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- /* coatcheck.ranks: ranks in a worker pod. coatcheck.replicas: worker replicas that `groups` groups need. */ -}}
{{- define "coatcheck.ranks" -}}
{{ if .Values.worker.gpus }}{{ .Values.worker.gpus }}{{ else }}{{ div .Values.model.tp .Values.worker.hosts }}{{ end }}
{{- end }}

{{- define "coatcheck.replicas" -}}
{{- include "coatcheck.replicasOf" (dict "root" . "groups" .Values.model.groups) -}}
{{- end }}

{{- define "coatcheck.replicasOf" -}}
{{- $ranks := mul (include "coatcheck.ranks" .root | int) .root.Values.worker.hosts -}}
{{ div (add (mul .groups .root.Values.model.tp) $ranks -1) $ranks }}
{{- end }}

{{- /* Credentials of the chart's own clients. They expect the Service's name in the router's certificate. The API key
is not among them: a key in the environment stays the old one after a rotation, so it is read from a file. */ -}}
{{- define "coatcheck.clientEnv" -}}
{{- if .Values.tls.secretName }}
- {name: COATCHECK_TLS_CA, value: /etc/coatcheck-tls/ca.crt}
{{- if .Values.tls.clientCaKey }}
- {name: COATCHECK_TLS_CERT, value: /etc/coatcheck-tls/tls.crt}
- {name: COATCHECK_TLS_KEY, value: /etc/coatcheck-tls/tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- /* A shell command that runs a client with the admin's key, if there is one. */ -}}
{{- define "coatcheck.withKey" -}}
{{- if .Values.adminKey.name }}COATCHECK_API_KEY="$(cat /etc/coatcheck-admin/key)" {{ end -}}
{{- end }}

{{- define "coatcheck.clientMounts" -}}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/coatcheck-tls, readOnly: true}
{{- end }}
{{- if .Values.adminKey.name }}
- {name: admin-key, mountPath: /etc/coatcheck-admin, readOnly: true}
{{- end }}
{{- end }}

{{- define "coatcheck.clientVolumes" -}}
{{- if .Values.tls.secretName -}}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName | quote }}, defaultMode: 288}
{{- end }}
{{- if .Values.adminKey.name }}
- name: admin-key
  secret:
    secretName: {{ .Values.adminKey.name | quote }}
    defaultMode: 288
    items: [{key: {{ .Values.adminKey.key | quote }}, path: key}]
{{- end }}
{{- end }}

{{- define "coatcheck.keyVolumes" -}}
{{- if .Values.apiKeys.name -}}
- name: keys
  secret: {secretName: {{ .Values.apiKeys.name | quote }}, defaultMode: 288}
{{- end }}
{{- end }}
