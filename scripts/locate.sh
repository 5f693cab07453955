# Finds the servers that the tests start. Sourced by install-services and with-services.
# shellcheck shell=bash
#
# Each function prints a path, or fails without a word if the program is missing or too old.

readonly MIN_REDIS=7 MIN_POSTGRES=14 MIN_MARIADB=10.6

# at_least VERSION MINIMUM: compares major.minor; "15" counts as "15.0".
at_least() {
  local have_major=${1%%.*} have_minor=0 want_major=${2%%.*} want_minor=0
  [[ $1 == *.* ]] && have_minor=${1#*.} && have_minor=${have_minor%%.*}
  [[ $2 == *.* ]] && want_minor=${2#*.}
  ((have_major > want_major || (have_major == want_major && have_minor >= want_minor)))
}

# version_of PATTERN COMMAND…: the first match of the pattern's group in what the command prints.
version_of() {
  local pattern=$1
  shift
  local text
  text=$("$@" 2>/dev/null) || return 1
  [[ $text =~ $pattern ]] && printf '%s\n' "${BASH_REMATCH[1]}"
}

find_redis() {
  local name path version
  for name in redis-server valkey-server; do
    path=$(command -v "$name") || continue
    version=$(version_of 'v=([0-9]+\.[0-9]+)' "$path" --version) || continue
    at_least "$version" "$MIN_REDIS" && printf '%s\n' "$path" && return 0
  done
  return 1
}

# The folder that holds initdb, postgres and createdb of one release. Debian keeps one folder for
# each release and puts only wrappers for the clients on PATH.
find_postgres() {
  local folder version best='' best_version=0
  for folder in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
    /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin \
    "$(dirname "$(command -v postgres || echo /nowhere/postgres)")"; do
    [[ -x $folder/postgres && -x $folder/initdb && -x $folder/createdb ]] || continue
    version=$(version_of '\(PostgreSQL\) ([0-9]+)' "$folder/postgres" --version) || continue
    if ((version > best_version)); then
      best=$folder best_version=$version
    fi
  done
  at_least "$best_version" "$MIN_POSTGRES" && printf '%s\n' "$best"
}

find_mariadb() {
  local path version
  for path in mariadbd mysqld /usr/sbin/mariadbd /usr/libexec/mariadbd /usr/sbin/mysqld; do
    path=$(command -v "$path") || continue
    version=$(version_of '([0-9]+\.[0-9]+)\.[0-9]+-MariaDB' "$path" --no-defaults --version) ||
      continue
    at_least "$version" "$MIN_MARIADB" && printf '%s\n' "$path" && return 0
  done
  return 1
}

# find_first NAME…: the first of these commands that exists.
find_first() {
  local name
  for name in "$@"; do
    command -v "$name" && return 0
  done
  return 1
}

find_mariadb_install() { find_first mariadb-install-db mysql_install_db; }
find_mariadb_client() { find_first mariadb mysql; }

# The library that lies about the time.
find_faketime() {
  local path
  for path in /usr/lib/*/faketime/libfaketime.so.1 /usr/lib*/faketime/libfaketime.so.1 \
    /usr/lib/faketime/libfaketime.so.1; do
    [[ -e $path ]] && printf '%s\n' "$path" && return 0
  done
  return 1
}

# A browser of the Chromium family; tests drive it without a display.
find_chromium() {
  find_first chromium-headless-shell chromium chromium-browser chrome-headless-shell google-chrome &&
    return 0
  local path
  for path in /usr/lib64/chromium-browser/headless_shell \
    /Applications/Chromium.app/Contents/MacOS/Chromium; do
    [[ -x $path ]] && printf '%s\n' "$path" && return 0
  done
  return 1
}
