# Makes the work tree of the built-in scenario: a git repository at /testbed
# with Debian's tornado and its tests. Runs once, as root, in the template's
# root file system (while the image is made, or as a command in the guest
# before the snapshot). Needs python3-tornado, git and the account "user".
# Fixed names and dates make the commit ids the same on every build.
set -eu
src=/usr/lib/python3/dist-packages/tornado
repo=/testbed
[ -d "$src" ] || { echo "missing $src: install python3-tornado" >&2; exit 1; }
mkdir -p "$repo"
cd "$repo"
cp -a "$src" tornado
find . -name __pycache__ -type d -prune -exec rm -rf {} +
cat > README.rst <<'TXT'
Tornado Web Server
==================

Tornado is a Python web framework and asynchronous networking library.

Run one test module with ``python3 -m tornado.testing tornado.test.escape_test``.
TXT
cat > setup.cfg <<'TXT'
[tool:pytest]
testpaths = tornado/test
python_files = *_test.py
python_classes = *Test
addopts = -p no:cacheprovider
TXT
printf '__pycache__/\n*.pyc\n' > .gitignore
export HOME=/root GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_AUTHOR_NAME=Maintainer GIT_AUTHOR_EMAIL=maintainer@example.invalid
export GIT_COMMITTER_NAME=Maintainer GIT_COMMITTER_EMAIL=maintainer@example.invalid
commit() {
	GIT_AUTHOR_DATE="$1" GIT_COMMITTER_DATE="$1" git commit -q -m "$2"
}
git init -q -b main
git config gc.auto 0
git config user.name Agent
git config user.email agent@example.invalid
git add README.rst setup.cfg .gitignore
commit '2022-07-03T18:00:00+0000' 'Add project files'
git add tornado ':!tornado/test'
commit '2022-07-03T18:30:00+0000' 'Import the library, release 6.2'
git add tornado
commit '2022-07-03T19:00:00+0000' 'Import the test suite'
python3 -m compileall -q tornado >/dev/null
# Test files import what only developers install (twisted): compile errors of
# those are not ours, but the command must not hide a missing interpreter.
chown -R user:user "$repo"
