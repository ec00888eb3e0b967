//! `redis-server` (or what `PEGAFLOW_DIRECTORY_SERVER` names) in a directory of its own, killed with the value.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value};

pub(crate) struct Server {
    pub(crate) port: u16,
    dir: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// Start one with more arguments.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let port = unused_port();
        let dir = std::env::temp_dir().join(format!("pega-directory-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut server = Self { port, dir, arguments, child: None };
        server.restart();
        server
    }

    /// Kill it and start it again, without what it held.
    pub(crate) fn restart(&mut self) {
        self.kill();
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
        self.child = Some(child);
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(30), "redis-server does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
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

/// The servers of a cluster talk to each other 10,000 ports above their own.
fn unused_port() -> u16 {
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port <= u16::MAX - 10_000 {
            return port;
        }
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
