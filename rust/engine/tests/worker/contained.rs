//! A role in PID, IPC, user and mount namespaces of its own, with the pool's directory mounted at another place.

use std::path::Path;
use std::process::{Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{getgid, getuid};

const NOTHING: Option<&str> = None;
/// Exit status of a container whose process was killed.
const KILLED: u8 = 137;

/// Run `ROLE ARGS...` in a container. Who kills this process kills the container.
pub fn run(dir: &Path, args: &[&str]) -> ExitCode {
    let (uid, gid) = (getuid(), getgid());
    let all = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS;
    unshare(all).expect("user namespaces must be allowed: sysctl user.max_user_namespaces, kernel.apparmor_*userns");
    // Who uses a pool is the same user in every container.
    std::fs::write("/proc/self/setgroups", "deny").unwrap();
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).unwrap();
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).unwrap();
    mount(NOTHING, "/", NOTHING, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NOTHING).unwrap();
    let inside = dir.join(format!("inside-{}", std::process::id()));
    std::fs::create_dir(&inside).unwrap();
    mount(Some(dir), &inside, NOTHING, MsFlags::MS_BIND, NOTHING).unwrap();
    start("contained-init", &inside, args)
}

/// Process 1 of the container. It cannot be killed from within, so it starts another.
pub fn init(dir: &Path, args: &[&str]) -> ExitCode {
    set_pdeathsig(Signal::SIGKILL).unwrap();
    assert_eq!(std::process::id(), 1);
    start(args[0], dir, &args[1..])
}

fn start(role: &str, dir: &Path, args: &[&str]) -> ExitCode {
    let mut child = Command::new(std::env::current_exe().unwrap()).arg(role).arg(dir).args(args).spawn().unwrap();
    let code = child.wait().unwrap().code().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(KILLED))
}
