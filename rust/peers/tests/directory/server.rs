//! `redis-server` (or what `PEGAFLOW_DIRECTORY_SERVER` names) in a directory of its own, killed with the value.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value};

const START_TIME_MAX: Duration = Duration::from_secs(120);

pub(crate) struct Server {
    pub(crate) port: u16,
    dir: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// Start one with more arguments.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let began = Instant::now();
        loop {
            let port = unused_port();
            let dir = std::env::temp_dir().join(format!("pega-directory-{}-{port}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            let arguments = arguments.iter().map(ToString::to_string).collect();
            let mut server = Self { port, dir, arguments, child: None };
            // Somebody else may have taken the port.
            if server.launch() {
                return server;
            }
            assert!(began.elapsed() < START_TIME_MAX, "redis-server does not start");
        }
    }

    /// Kill it and start it again, without what it held.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let began = Instant::now();
        // Meanwhile a connection of somebody else may have the port.
        while !self.launch() {
            assert!(began.elapsed() < START_TIME_MAX, "redis-server does not start again");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Start it and wait until it answers; returns whether it does.
    fn launch(&mut self) -> bool {
        let program = std::env::var("PEGAFLOW_DIRECTORY_SERVER").unwrap_or_else(|_| "redis-server".into());
        let mut command = Command::new(program);
        if self.arguments.first().is_some_and(|argument| argument == "--sentinel") {
            let config = self.dir.join("sentinel.conf");
            std::fs::write(&config, "").unwrap();
            command.arg(config).arg("--sentinel");
        } else {
            command.args(["--save", "", "--appendonly", "no"]).args(&self.arguments);
        }
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string()]).current_dir(&self.dir);
        let child = command.stdout(Stdio::null()).spawn().expect("the package redis-server is installed");
        let child = self.child.insert(child);
        let said = format!("process_id:{}\r\n", child.id());
        let began = Instant::now();
        while !facts_of(self.port).is_ok_and(|facts| facts.contains(&said)) {
            if child.try_wait().unwrap().is_some() {
                self.child = None;
                return false;
            }
            assert!(began.elapsed() < START_TIME_MAX, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Have it stand still, or go on.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    /// With kill -9.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    pub(crate) fn connect(&self) -> Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    /// Keys that begin like this.
    pub(crate) fn keys(&self, begin: &str) -> Vec<String> {
        redis::cmd("KEYS").arg(format!("{begin}*")).query(&mut self.connect()).unwrap()
    }
}

/// What whoever listens at a port says of itself.
fn facts_of(port: u16) -> RedisResult<String> {
    let time_max = Duration::from_secs(5);
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/"))?;
    let mut connection = client.get_connection_with_timeout(time_max)?;
    connection.set_read_timeout(Some(time_max))?;
    redis::cmd("INFO").arg("server").query(&mut connection)
}

/// The servers of a cluster talk to each other 10,000 ports above their own. Both are below those that the kernel gives
/// to whoever connects somewhere: they stay free until they are used, and when a server is started again.
fn unused_port() -> u16 {
    loop {
        let nanos = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let port = 10_000 + (nanos / 64 % 12_000) as u16;
        if [port, port + 10_000].iter().all(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()) {
            return port;
        }
        std::thread::sleep(Duration::from_micros(10));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _best_effort = std::fs::remove_dir_all(&self.dir);
    }
}

/// One command, its words separated by spaces.
pub(crate) fn ask(connection: &mut Connection, words: &str) -> RedisResult<Value> {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.query(connection)
}
