# syntax=docker/dockerfile:1
# A layer over an image that has TensorRT-LLM: our package, and a user without rights.
#
#   docker buildx build -f deploy/docker/tensorrt-llm.Dockerfile --build-arg BASE=nvcr.io/nvidia/tensorrt-llm/release@sha256:... -t dflash-serve-tensorrt-llm:0.3.0 .
#
# BASE   an image with TensorRT-LLM 1.3.0rc14 or newer, by digest; there is no default, so that every build is pinned.
#        For a Dynamo worker: nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime@sha256:...
ARG BASE

FROM ${BASE} AS build
ARG BASE
# A tag can move to another image.
RUN case "$BASE" in *@sha256:*) ;; *) echo "BASE must be pinned by digest: nvcr.io/nvidia/tensorrt-llm/release@sha256:..." >&2; exit 2 ;; esac
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
COPY pyproject.toml README.md LICENSE /src/
COPY dflash_serve /src/dflash_serve
COPY backends /src/backends
COPY engines /src/engines
COPY deploy/helm /src/deploy/helm
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels /src
COPY deploy/docker/link_cubins.sh /wheels/link_cubins.sh

FROM ${BASE}
ARG VERSION=0.3.0
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="dflash-serve on TensorRT-LLM" \
      org.opencontainers.image.description="TensorRT-LLM with checked DFlash drafters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$BASE"
USER 0
# pip may add packages that ours needs, but not change any that the engine's image has.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze --exclude-editable > /tmp/there.txt && \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    python3 -m pip install --no-cache-dir --disable-pip-version-check --constraint /tmp/there.txt "$(ls /wheels/*.whl)[prove]" && \
    rm /tmp/there.txt && \
    sh /wheels/link_cubins.sh && \
    install -d -o 10001 -g 10001 /models /cache /prepared
# `certify` runs aiperf, whose packages must not replace others: --build-arg AIPERF=aiperf==0.13.0.
ARG AIPERF=
# hadolint ignore=DL3013
RUN if [ -n "$AIPERF" ]; then \
      python3 -m pip install --no-cache-dir --disable-pip-version-check --target /opt/aiperf "$AIPERF" && \
      printf '#!/bin/sh\nPYTHONPATH=/opt/aiperf exec python3 -m aiperf "$@"\n' > /usr/local/bin/aiperf && \
      chmod 755 /usr/local/bin/aiperf; \
    fi
# No usage statistics are sent.
ENV TRTLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    HOME=/cache \
    USER=dflash \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/models/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels sh /wheels/link_cubins.sh probe
WORKDIR /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=30s --start-period=60m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=25)"]
ENTRYPOINT ["dflash-serve"]
CMD ["serve", "/etc/dflash-serve/deployment.yaml", "--backend", "tensorrt-llm", "--host", "0.0.0.0", "--port", "8000", "--folder", "/prepared"]
