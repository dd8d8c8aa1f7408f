# syntax=docker/dockerfile:1
# The control side: command line, flows, Prefect server and worker, Ray's head, CPU builds. No CUDA.
#
#   docker build --file images/control.Dockerfile --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:... .
#
# PYTHON_IMAGE has no default: what it is built on is chosen, by digest, by who builds it (docs/guides/kubernetes.md).
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS build
ARG PYTHON_IMAGE
# hadolint ignore=SC2016
RUN case "${PYTHON_IMAGE}" in *@sha256:*) ;; *) \
      echo "PYTHON_IMAGE=${PYTHON_IMAGE} is not pinned: give NAME:TAG@sha256:DIGEST" >&2; exit 1;; esac
# Where torch for CPUs is found; without it pip takes the one that brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/enginesmith
ENV PATH=/opt/enginesmith/bin:$PATH
COPY . .
RUN pip install --constraint constraints.txt ./enginesmith '.[control]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="enginesmith control" org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's probes of Ray. libgomp1: onnxruntime and torch.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 wget \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 enginesmith \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin enginesmith
COPY --from=build /opt/enginesmith /opt/enginesmith
ENV PATH=/opt/enginesmith/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
USER 10001:10001
RUN enginesmith doctor
CMD ["enginesmith", "--help"]
