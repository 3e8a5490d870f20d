# Shared by the scripts that need a Python environment: finds a Python, makes an environment, installs.

# find_python [LOW HIGH]: prints a Python from 3.LOW to 3.HIGH (default: 3.11 or newer), python3 before
# the others; PYTHON names another. Fails with one line.
find_python() {
    local low=${1:-11} high=${2:-99} candidate range
    range="3.$low $([ "$high" = 99 ] && echo or newer || echo "to 3.$high")"
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python3.10}; do
        # A pyenv shim of a version that is not selected exists but does not run.
        if runs_python "$candidate" "$low" "$high"; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is no Python $range; name another, or leave it out" >&2
        return 2
    fi
    echo "No Python $range found; install one or name it: PYTHON=/path/to/python" >&2
    return 1
}

# runs_python PYTHON LOW HIGH
runs_python() {
    "$1" -c "import sys, venv; sys.exit(not (3, $2) <= sys.version_info[:2] <= (3, $3))" \
        >/dev/null 2>&1
}

# make_venv PYTHON FOLDER: with the newest pip, if it can be had. That of Python 3.11 spends a minute
# longer on the choice of versions.
make_venv() {
    "$1" -m venv --clear "$2" || return
    "$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --upgrade pip \
        </dev/null || true
}

# make_environment VENV ROOT [EXTRA]
# Installs the shardstore of ROOT, editable, into VENV; does nothing where that is up to date.
make_environment() {
    local venv=$1 root=$2 extra=${3:-} python stamp wanted
    if ! runs_python "$venv/bin/python" 11 99 || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        # Only the remains of an environment may be cleared away.
        if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
            echo "$venv exists and is no virtual environment; remove it or name another" >&2
            return 2
        fi
        python=$(find_python)
        if ! mkdir -p "$(dirname "$venv")" 2>/dev/null || [ ! -w "$(dirname "$venv")" ]; then
            echo "$venv cannot be made: nothing can be written there; name another folder" >&2
            return 2
        fi
        if ! make_venv "$python" "$venv"; then
            rm -f "$venv/.shardstore-installed"
            echo "No virtual environment in $venv (Debian, Ubuntu: apt install python3-venv)" >&2
            return 1
        fi
    fi
    stamp=$venv/.shardstore-installed
    wanted="$root [$extra] $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
        echo "installing into $venv (minutes on the first run)"
        install_into "$venv" -c "$root/constraints.txt" -e "$root${extra:+[$extra]}"
        echo "$wanted" >"$stamp"
    fi
}

# install_into VENV ARGUMENT...: of pip install.
install_into() {
    local alone=()
    case " $* " in
    # An editable installation builds in the sources: one at a time.
    *" -e "* | *" --editable "*) ! command -v flock >/dev/null || alone=(flock "$root/pyproject.toml") ;;
    esac
    # Python compiles what is imported; compiling all of PyTorch here would take longer.
    ${alone[@]+"${alone[@]}"} "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
        "${@:2}" </dev/null
}

# begin_environment NAME LOW HIGH [--force]
# Makes an empty .envs/NAME, and sets env_dir; $base is the environment that it lies over, if any. Ends
# the script with 0 if the environment is complete (--force: not even then), and with 3 if there is no
# Python for it. finish_environment completes it.
begin_environment() {
    local python
    env_dir=$root/.envs/$1
    env_wanted=$(cat "$root/constraints.txt" "$root/pyproject.toml" "$0" <(echo "${base:-}") | cksum)
    if [ "${4:-}" != --force ] && [ "$(cat "$env_dir/.complete" 2>/dev/null)" = "$env_wanted" ]; then
        exit 0
    fi
    python=$(find_python "$2" "$3") || exit 3
    echo "${0##*/}: making $env_dir with $python"
    make_venv "$python" "$env_dir"
}

# put_over VENV BASE: gives VENV, of the same Python, the packages of BASE too, where it lacks them.
put_over() {
    # addsitedir follows the links of BASE, such as to an editable installation.
    echo "import site; site.addsitedir('$(packages_of "$2")')" >"$(packages_of "$1")/base.pth"
}

packages_of() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

finish_environment() {
    echo "$env_wanted" >"$env_dir/.complete"
}
