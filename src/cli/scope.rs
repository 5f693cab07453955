//! Which of the options that stand in [`Global`](super::Global) a command takes.
//!
//! Each may stand before or after the command. One that would do nothing there is neither shown nor
//! taken; what the environment says holds for all commands, so nobody has to unset it.

use clap::{Arg, ArgMatches, Command};

/// Whether the command of these words, none for the binary itself, does anything with an option.
fn takes(words: &[&str], option: &str) -> bool {
    let reads_settings = matches!(words, ["serve" | "migrate" | "demo" | "bench" | "doctor", ..])
        && words != ["bench", "report"];
    let calls_nobody = reads_settings
        || matches!(words, ["bench", "report"] | ["activity", "schema"])
        || matches!(words, ["token" | "completions" | "man" | "version", ..]);
    match option {
        "output" => true,
        "config" => reads_settings || words.is_empty(),
        // The calls to the server that it starts.
        "timeout" if words == ["demo"] => true,
        // Whom to call, as whom.
        _ => !calls_nobody,
    }
}

/// The command line as it is read, and shown in help and manuals: a command has what it does not take
/// as a hidden option, for [`useless`] to find.
pub(super) fn as_read(root: Command) -> Command {
    let common = common(&root);
    with(root, &[], &|words| {
        let hidden = common.iter().filter(|arg| !takes(words, arg.get_id().as_str()));
        hidden.map(|arg| arg.clone().hide(true)).collect()
    })
}

/// The command line as a shell completes it, which knows of no hidden options.
pub(super) fn as_completed(root: Command) -> Command {
    let common: Vec<Arg> = common(&root).into_iter().map(|arg| arg.global(false)).collect();
    let root = root.mut_args(|arg| arg.global(false));
    with(root, &[], &|words| {
        common.iter().filter(|arg| takes(words, arg.get_id().as_str())).cloned().collect()
    })
}

fn common(root: &Command) -> Vec<Arg> {
    root.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect()
}

/// Gives each command below these words the options that are chosen for its own words.
fn with(command: Command, words: &[&str], choose: &dyn Fn(&[&str]) -> Vec<Arg>) -> Command {
    let names: Vec<String> =
        command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.iter().fold(command, |command, name| {
        let words = [words, &[name.as_str()]].concat();
        command.mut_subcommand(name, |command| with(command.args(choose(&words)), &words, choose))
    })
}

/// What is given on the command line and does nothing in the command that it is given to, as a
/// sentence.
pub(super) fn useless(root: &Command, matches: &ArgMatches) -> Option<String> {
    let (mut words, mut last) = (Vec::new(), matches);
    while let Some((word, below)) = last.subcommand() {
        words.push(word);
        last = below;
    }
    let is_given = |arg: &&Arg| {
        let source = last.value_source(arg.get_id().as_str());
        source == Some(clap::parser::ValueSource::CommandLine)
    };
    let common = common(root);
    let given = common.iter().filter(is_given);
    let option = given.map(|arg| arg.get_id().as_str()).find(|option| !takes(&words, option))?;
    let why = if option == "config" { "it reads no settings" } else { "it calls no server" };
    Some(format!("`seckill {}` takes no --{}: {why}", words.join(" "), option.replace('_', "-")))
}
