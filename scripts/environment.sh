# Shared by scripts/quickstart and scripts/test: finds a Python, makes an environment, installs.

# Prints a Python of at least 3.11; PYTHON names another than the first one found.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ] && ! new_enough "$PYTHON"; then
        echo "PYTHON=$PYTHON is no Python of at least 3.11; name another, or leave it out" >&2
        return 2
    fi
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer found; install one or name it: PYTHON=/path/to/python" >&2
    return 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# make_environment VENV ROOT [EXTRA]
# Installs the shardstore of ROOT, editable, into VENV; does nothing where that is up to date.
make_environment() {
    local venv=$1 root=$2 extra=${3:-} python stamp wanted
    if ! new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        # Only the remains of an environment may be cleared away.
        if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
            echo "$venv exists and is no virtual environment; remove it or name another" >&2
            return 2
        fi
        python=$(find_python)
        if ! mkdir -p "$(dirname "$venv")" 2>/dev/null || [ ! -w "$(dirname "$venv")" ]; then
            echo "$venv can not be made: nothing can be written there; name another folder" >&2
            return 2
        fi
        if ! "$python" -m venv --clear "$venv"; then
            rm -f "$venv/.shardstore-installed"
            echo "No virtual environment in $venv (Debian, Ubuntu: apt install python3-venv)" >&2
            return 1
        fi
    fi
    stamp=$venv/.shardstore-installed
    wanted="$root [$extra] $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
        echo "installing into $venv (minutes on the first run)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
            -c "$root/constraints.txt" -e "$root${extra:+[$extra]}" </dev/null
        echo "$wanted" >"$stamp"
    fi
}
