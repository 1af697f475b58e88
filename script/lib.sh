# Shared by the scripts beside it; sourced from the repository's root. Everything here talks on stderr only, does nothing
# twice (a stamp holds the check sum of what was installed), and leaves no half-made state that the next call would trust.
# Functions return 1 themselves: where they are called in a condition, `set -e` is off.

say() { printf '%s\n' "$*" >&2; }

# The first Python >= 3.11 on PATH; OUTLAST_PYTHON overrides.
find_python() {
    for candidate in ${OUTLAST_PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    say "Outlast needs Python 3.11 or newer; none was found on PATH (or set OUTLAST_PYTHON)."
    return 1
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

# apt PACKAGE...: refreshes the lists once; a failure is said and left to the tests, which name what they lack.
apt() {
    say "installing with apt: $*"
    { { [ -n "${apt_fresh:-}" ] || apt-get update -q; } && apt_fresh=1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"; } >&2 || say "apt could not install: $*"
}

make_venv() {
    python=$(find_python) || return 1
    say "making .venv with $python"
    if ! "$python" -m venv --clear .venv >&2; then # Debian keeps ensurepip in a package of its own
        can_apt || { say "Python's venv module does not work here; on Debian: apt-get install python3-venv"; return 1; }
        apt python3-venv
        "$python" -m venv --clear .venv >&2
    fi
}

# set_up core|postgres|dev: .venv with the hash-locked packages of requirements/$1.txt and this package, editable. Each holds those before it.
set_up() {
    wanted=$(cat pyproject.toml requirements/core.txt requirements/postgres.txt requirements/dev.txt | cksum)" $(pwd)"
    wider=dev
    [ "$1" = core ] && wider="postgres dev"
    for done_for in "$1" $wider; do
        [ "$(cat ".venv/outlast-$done_for" 2>/dev/null)" = "$wanted" ] && [ -x .venv/bin/python ] && return
    done
    if command -v flock >/dev/null 2>&1; then # two scripts started at once: one sets up, the other waits and finds it done
        exec 9>.venv.lock
        flock 9
        [ "$(cat ".venv/outlast-$1" 2>/dev/null)" = "$wanted" ] && { exec 9>&-; return; }
    fi
    .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv || return 1
    say "installing requirements/$1.txt (first time, or the lock has changed)"
    rm -f ".venv/outlast-$1"
    {
        PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -q --require-hashes --no-deps -r "requirements/$1.txt" &&
            PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
    } >&2 || { say "pip could not install requirements/$1.txt"; return 1; }
    printf '%s\n' "$wanted" >".venv/outlast-$1"
    if command -v flock >/dev/null 2>&1; then exec 9>&-; fi
}

# Programs of the system that the tests run against; as root on Debian they are installed, elsewhere the tests say what they lack.
set_up_system() {
    missing=
    command -v sqlite3 >/dev/null 2>&1 || missing="$missing sqlite3"
    command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
    command -v postgres >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
    ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing="$missing faketime"
    command -v pgbouncer >/dev/null 2>&1 || [ -x /usr/sbin/pgbouncer ] || missing="$missing pgbouncer"
    command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium"
    [ -z "$missing" ] && return
    # shellcheck disable=SC2086  # a list of words
    if can_apt; then apt $missing; else say "not found, and not root on Debian:$missing"; fi
}

# npm packages of the tests, by the check sums of their lock file.
set_up_node() {
    PATH="$(pwd)/.venv/bin:$PATH"
    command -v npm >/dev/null 2>&1 || { say "no Node here: tests that need it will say so"; return; }
    wanted=$(cat tests/js/package-lock.json | cksum)
    [ "$(cat tests/js/node_modules/.stamp 2>/dev/null)" = "$wanted" ] && return
    say "installing tests/js with npm"
    (cd tests/js && npm ci --silent --ignore-scripts --no-audit --no-fund) >&2 || { say "npm could not install tests/js"; return; }
    printf '%s\n' "$wanted" >tests/js/node_modules/.stamp
}
