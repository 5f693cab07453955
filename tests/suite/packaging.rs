//! What stands in `deploy/` and in the Dockerfile, held against the program: every setting is one,
//! every port is listened on, every name leads somewhere. And what Cargo packages: all that is built from.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use seckill::config::Settings;
use serde_yaml_ng::Value;

use crate::support::{certs::Authority, process::Serve, scrape};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_yaml_ng::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn strings(value: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value:?}")).to_owned();
    value.as_sequence().unwrap_or_else(|| panic!("{value:?}")).iter().map(text).collect()
}

fn items(value: &Value) -> &Vec<Value> {
    value.as_sequence().unwrap_or_else(|| panic!("{value:?} is no list"))
}

/// Runs the program in this folder, with these variables and no others.
fn seckill(folder: &Path, args: &[String], variables: &BTreeMap<String, String>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(args)
        .current_dir(folder)
        .env_clear()
        .envs(variables)
        .output()
        .unwrap()
}

/// Checks the settings of a command line, or, if it is not `serve`, that there is such a command.
fn accepts(folder: &Path, args: &[String], variables: &BTreeMap<String, String>) {
    let mut args = args.to_vec();
    args.push(if args[0] == "serve" { "--check-config" } else { "--help" }.to_owned());
    let output = seckill(folder, &args, variables);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args:?} {variables:?}: {said}");
    if args[0] != "serve" {
        // `migrate up` reads settings too, all of them.
        let serve = ["serve", "--check-config", "--insecure"].map(str::to_owned).to_vec();
        let output = seckill(folder, &serve, variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{variables:?}: {said}");
    }
}

/// The words behind an instruction of the Dockerfile.
fn instruction(name: &str) -> Vec<String> {
    let file = read("Dockerfile");
    let last = file.lines().rfind(|line| line.starts_with(&format!("{name} ")));
    let (_, rest) = last.unwrap_or_else(|| panic!("no {name}")).split_once(' ').unwrap();
    match rest.find('[') {
        Some(list) => serde_json::from_str(&rest[list..]).unwrap(),
        None => rest.split(' ').map(str::to_owned).collect(),
    }
}

/// The ports that settings in TOML listen on.
fn ports(settings: &str) -> Vec<u64> {
    let settings: toml::Table = settings.parse().unwrap();
    let port = |section: &str| {
        let (_, port) = settings[section]["addr"].as_str().unwrap().rsplit_once(':').unwrap();
        port.parse().unwrap()
    };
    vec![port("grpc"), port("http")]
}

fn shutdown_grace_s() -> u64 {
    Settings::default().grpc.shutdown_grace_ms / 1_000
}

/// What `cargo package` would publish of a package of this workspace.
fn packaged(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["package", "--list", "--allow-dirty", "--offline", "--package", package])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// What the program is built from: files, and folders with all that is in them.
const BUILT_FROM: &[&str] = &[
    "Cargo.lock",
    "build.rs",
    "dashboard/dist",
    "examples/sale.yaml",
    "lua",
    "proto",
    "src",
    "migrations/src",
];

/// The files at this place of the repository.
fn files(place: &Path) -> Vec<PathBuf> {
    if !place.is_dir() {
        return vec![place.to_owned()];
    }
    let entries = fs::read_dir(place).unwrap();
    entries.flat_map(|entry| files(&entry.unwrap().path())).collect()
}

/// The places that `include_str!` and `include_bytes!` name, as far as they are written out.
fn included(source: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(source).unwrap();
    let calls =
        ["include_str!(", "include_bytes!("].into_iter().flat_map(|call| text.split(call).skip(1));
    let places = calls.filter_map(|call| {
        let call = call.trim_start();
        let (name, _) =
            call.strip_prefix("concat!(").unwrap_or(call).strip_prefix('"')?.split_once('"')?;
        let mut place = source.parent().unwrap().to_owned();
        for part in name.split('/') {
            if part == ".." {
                place.pop();
            } else {
                place.push(part);
            }
        }
        Some(place)
    });
    places.collect()
}

#[test]
fn all_that_the_program_is_built_from_is_in_the_packages() {
    let (program, migrations) = (packaged("seckill"), packaged("seckill-migrations"));
    let mut includes = 0;
    for file in BUILT_FROM.iter().flat_map(|place| files(&root().join(place))) {
        let name = file.strip_prefix(root()).unwrap().to_str().unwrap();
        match name.strip_prefix("migrations/") {
            Some(name) => assert!(migrations.contains(name), "{name} is not packaged"),
            None => assert!(program.contains(name), "{name} is not packaged"),
        }
        if file.extension().is_some_and(|extension| extension == "rs") {
            for place in included(&file) {
                includes += 1;
                let is_known = BUILT_FROM.iter().any(|known| place.starts_with(root().join(known)));
                assert!(is_known, "{name} includes {place:?}: add it to BUILT_FROM");
            }
        }
    }
    assert!(includes >= 5, "{includes} includes were found");
}

#[test]
fn the_image_starts_with_its_own_settings() {
    let folder = tempfile::tempdir().unwrap();
    let settings = read("deploy/image.toml");
    fs::write(folder.path().join("seckill.toml"), &settings).unwrap();
    let none = BTreeMap::new();
    accepts(folder.path(), &instruction("CMD"), &none);
    let open = seckill(folder.path(), &["serve", "--check-config"].map(str::to_owned), &none);
    assert_eq!(open.status.code(), Some(64), "nobody would be asked who he is");

    let exposed: Vec<u64> = instruction("EXPOSE").iter().map(|p| p.parse().unwrap()).collect();
    assert_eq!(exposed, ports(&settings));
    let program = instruction("ENTRYPOINT");
    assert_eq!(instruction("HEALTHCHECK")[0], program[0]);
    accepts(folder.path(), &instruction("HEALTHCHECK")[1..], &none);
    // The server in there, where `seckill health` looks for one.
    assert_eq!(exposed[0], u64::from(Settings::default().grpc.addr.port()));
}

#[test]
fn the_services_of_compose_have_settings_that_exist() {
    let compose = yaml("deploy/compose.yaml");
    let services = compose["services"].as_mapping().unwrap();
    let mut ours = 0;
    for (name, service) in services {
        if service["image"] != "seckill" {
            continue;
        }
        ours += 1;
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("seckill.toml"), read("deploy/image.toml")).unwrap();
        let environment = service["environment"].as_mapping().unwrap();
        let variables: BTreeMap<String, String> = environment
            .iter()
            .map(|(key, value)| {
                let value = value.as_str().unwrap();
                let value = value.replace("${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD}", "secret");
                assert!(!value.contains('$'), "{name:?}: {value}");
                (key.as_str().unwrap().to_owned(), value)
            })
            .collect();
        accepts(folder.path(), &strings(&service["command"]), &variables);
        // The hosts in the URLs are services.
        for value in variables.values() {
            let host = url::Url::parse(value).unwrap().host_str().unwrap().to_owned();
            assert!(services.contains_key(host.as_str()), "no service {host}");
        }
        for dependency in service["depends_on"].as_mapping().unwrap().keys() {
            assert!(services.contains_key(dependency), "no service {dependency:?}");
        }
    }
    assert_eq!(ours, 2);

    let server = &compose["services"]["server"];
    let inside = ports(&read("deploy/image.toml"));
    for (port, expected) in strings(&server["ports"]).iter().zip(&inside) {
        let parts: Vec<&str> = port.split(':').collect();
        assert_eq!((parts[0], parts[2]), ("127.0.0.1", expected.to_string().as_str()), "{port}");
    }
    let grace = server["stop_grace_period"].as_str().unwrap().trim_end_matches('s');
    assert!(grace.parse::<u64>().unwrap() > shutdown_grace_s());
    let redis = strings(&compose["services"]["redis"]["command"]).join(" ");
    assert!(redis.contains("--maxmemory-policy noeviction"), "{redis}");
    assert!(redis.contains("--appendonly yes"), "{redis}");
}

/// A folder with what Kubernetes would mount below /etc/seckill.
fn mounted(pod: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display().to_string();
    let authority = Authority::new("servers");
    let (cert, key) = authority.for_server().write(folder.path());
    let config = yaml("deploy/kubernetes/config.yaml");
    let secrets = yaml("deploy/kubernetes/secret.example.yaml");
    for volume in items(&pod["volumes"]) {
        let name = volume["name"].as_str().unwrap();
        let place = folder.path().join(name);
        fs::create_dir_all(&place).unwrap();
        let source = match (&volume["configMap"]["name"], &volume["secret"]["secretName"]) {
            (map, _) if *map == config["metadata"]["name"] => &config["data"],
            (_, secret) if *secret == secrets["metadata"]["name"] => &secrets["stringData"],
            (_, secret) if secret == "seckill-tls" => {
                fs::copy(&cert, place.join("tls.crt")).unwrap();
                fs::copy(&key, place.join("tls.key")).unwrap();
                continue;
            }
            other => panic!("nothing is named {other:?}"),
        };
        for (file, text) in source.as_mapping().unwrap() {
            let text = text.as_str().unwrap().replace("/etc/seckill", &here);
            fs::write(place.join(file.as_str().unwrap()), text).unwrap();
        }
    }
    folder
}

#[test]
fn the_pods_start_with_the_files_that_they_mount() {
    let deployment = yaml("deploy/kubernetes/deployment.yaml");
    let pod = &deployment["spec"]["template"]["spec"];
    let folder = mounted(pod);
    let here = folder.path().display().to_string();
    let containers = items(&pod["initContainers"]).iter().chain(items(&pod["containers"]));
    for container in containers {
        // Each volume is where this test has put it.
        for mount in items(&container["volumeMounts"]) {
            let expected = format!("/etc/seckill/{}", mount["name"].as_str().unwrap());
            assert_eq!(mount["mountPath"], expected.as_str());
        }
        let args: Vec<String> = strings(&container["args"]);
        let args: Vec<String> = args.iter().map(|arg| arg.replace("/etc/seckill", &here)).collect();
        let variables: BTreeMap<String, String> = items(&container["env"])
            .iter()
            .map(|entry| {
                let value = entry["value"].as_str().unwrap().replace("/etc/seckill", &here);
                (entry["name"].as_str().unwrap().to_owned(), value)
            })
            .collect();
        accepts(folder.path(), &args, &variables);
        let image = format!("seckill:{}", env!("CARGO_PKG_VERSION"));
        assert_eq!(container["image"], image.as_str());
        let confined = &container["securityContext"];
        assert_eq!(confined["readOnlyRootFilesystem"], true);
        assert_eq!(confined["allowPrivilegeEscalation"], false);
        assert_eq!(strings(&confined["capabilities"]["drop"]), ["ALL"]);
    }
    let user = pod["securityContext"]["runAsUser"].as_u64().unwrap();
    assert_eq!(instruction("USER"), [format!("{user}:{user}")]);
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    let pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    assert!(grace > pause + shutdown_grace_s());
}

#[tokio::test]
async fn the_probes_of_the_pods_are_answered_and_their_names_agree() {
    let deployment = yaml("deploy/kubernetes/deployment.yaml");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let config = yaml("deploy/kubernetes/config.yaml");
    let named: Vec<(&str, u64)> = items(&container["ports"])
        .iter()
        .map(|port| (port["name"].as_str().unwrap(), port["containerPort"].as_u64().unwrap()))
        .collect();
    let settings = config["data"]["seckill.toml"].as_str().unwrap();
    assert_eq!(named.iter().map(|(_, port)| *port).collect::<Vec<_>>(), ports(settings));

    let serve = Serve::over(&Settings::default()).with("DATABASE__URL", "sqlite::memory:");
    let mut process = serve.with("HTTP__ADDR", "127.0.0.1:0").start().await;
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let get = &container[probe]["httpGet"];
        assert_eq!(get["port"], "http", "{probe}");
        let path = get["path"].as_str().unwrap();
        assert_eq!(scrape::get(process.http_addr(), path).await.code, 200, "{probe}");
    }
    process.stop().await;

    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    assert_eq!(&deployment["spec"]["selector"]["matchLabels"], labels);
    let service = yaml("deploy/kubernetes/service.yaml");
    assert_eq!(&service["spec"]["selector"], labels);
    assert_eq!(service["spec"]["clusterIP"], "None");
    for port in items(&service["spec"]["ports"]) {
        let target = port["targetPort"].as_str().unwrap();
        let (_, number) = named.iter().find(|(name, _)| *name == target).unwrap();
        assert_eq!(port["port"], *number);
    }
    let budget = yaml("deploy/kubernetes/disruption-budget.yaml");
    assert_eq!(&budget["spec"]["selector"]["matchLabels"], labels);
}

#[test]
fn every_manifest_is_applied() {
    let folder = root().join("deploy/kubernetes");
    let mut files: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|file| file != "kustomization.yaml" && file != "secret.example.yaml")
        .collect();
    files.sort();
    let mut applied = strings(&yaml("deploy/kubernetes/kustomization.yaml")["resources"]);
    applied.sort();
    assert_eq!(applied, files);
    for file in &files {
        let manifest = yaml(&format!("deploy/kubernetes/{file}"));
        let known =
            ["v1/ConfigMap", "apps/v1/Deployment", "v1/Service", "policy/v1/PodDisruptionBudget"];
        let text = |key: &str| manifest[key].as_str().unwrap().to_owned();
        let kind = format!("{}/{}", text("apiVersion"), text("kind"));
        assert!(known.contains(&kind.as_str()), "{file}: {kind}");
    }
}

#[test]
fn the_unit_of_systemd_starts_the_server_with_settings_that_exist() {
    let unit = read("deploy/systemd/seckill.service");
    let values = |key: &str| -> Vec<String> {
        // What is commented out is offered all the same.
        let lines = unit.lines().map(|line| line.strip_prefix('#').unwrap_or(line));
        let prefix = format!("{key}=");
        lines.filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    file("engine-url", "redis://127.0.0.1");
    file("database-url", "postgres://seckill@127.0.0.1/seckill");
    file("tokens", &format!("anna:ops:{}", "1".repeat(64)));
    file("seckill.toml", "");
    let here = folder.path().display().to_string();
    let variables: BTreeMap<String, String> = values("Environment")
        .iter()
        .map(|line| {
            let (name, value) = line.split_once('=').unwrap();
            (name.to_owned(), value.replace("%d", &here).replace("/etc/seckill", &here))
        })
        .collect();
    assert_eq!(variables.len(), 4, "{variables:?}");
    for credential in values("LoadCredential") {
        let (name, _) = credential.split_once(':').unwrap();
        assert!(variables.values().any(|value| value.ends_with(name)), "{name}");
    }
    let start = values("ExecStart");
    let (_, args) = start[0].split_once(' ').unwrap();
    let args: Vec<String> = args.split(' ').map(str::to_owned).collect();
    accepts(folder.path(), &args, &variables);
    accepts(folder.path(), &args, &BTreeMap::new());
    let stop = values("TimeoutStopSec")[0].trim_end_matches('s').parse::<u64>().unwrap();
    assert!(stop > shutdown_grace_s());
    assert_eq!(values("RestartPreventExitStatus"), ["64"]);
}
