//! `docs/api.md`, made of the comments in `proto/`; `UPDATE_EXPECT=1` writes it anew.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    FileDescriptorSet, field_descriptor_proto::Label, field_descriptor_proto::Type,
};

const PACKAGE: &str = "seckill.v1";
const HEAD: &str = "\
<!-- Made of the comments in proto/ by tests/suite/api_reference.rs: UPDATE_EXPECT=1 writes it anew. -->

# API reference

The services, methods, messages and enums of `seckill.v1`, in the words of [proto/seckill/v1](../proto/seckill/v1). \
What a caller must know before the first call is in [README.md](../README.md#what-a-caller-must-know); \
who may call what in [security.md](security.md). Unless a field says otherwise, text is UTF-8 and an unset \
message means what its comment says.
";

/// The comments of a file, by the path of what they stand at.
type Comments = BTreeMap<Vec<i32>, String>;

fn comments(file: &FileDescriptorProto) -> Comments {
    let info = file.source_code_info.as_ref().expect("the descriptors have the comments");
    let told = |location: &prost_types::source_code_info::Location| {
        let text = location.leading_comments.as_ref()?;
        let lines: Vec<&str> =
            text.lines().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
        Some((location.path.clone(), lines.join("\n").trim().to_owned()))
    };
    info.location.iter().filter_map(told).collect()
}

/// What stands at this path. Everything has a comment: buf lint sees to it.
fn comment<'a>(comments: &'a Comments, path: &[i32]) -> &'a str {
    comments.get(path).unwrap_or_else(|| panic!("no comment at {path:?}"))
}

/// Text in a cell: one line, and its limit as a line of its own.
fn cell(text: &str) -> String {
    let text = text.replace('|', "\\|").replace("\nLimit: ", "<br>**Limit:** ");
    text.lines().collect::<Vec<_>>().join(" ")
}

/// Where a name of ours leads, or the name of a type of somebody else.
fn linked(full_name: &str) -> String {
    match full_name.strip_prefix(&format!(".{PACKAGE}.")) {
        Some(name) => format!("[{name}](#{})", name.to_lowercase()),
        None => format!("`{}`", full_name.trim_start_matches('.')),
    }
}

fn kind(field: &FieldDescriptorProto) -> String {
    let of = match field.r#type() {
        Type::Message | Type::Enum => linked(field.type_name()),
        Type::Bool => "bool".to_owned(),
        Type::Int32 => "int32".to_owned(),
        Type::Int64 => "int64".to_owned(),
        Type::String => "string".to_owned(),
        other => panic!("{other:?} is not used yet"),
    };
    if field.label() == Label::Repeated {
        format!("list of {of}")
    } else if field.proto3_optional() {
        format!("{of}, may be unset")
    } else {
        of
    }
}

fn message(page: &mut String, message: &DescriptorProto, comments: &Comments, path: &[i32]) {
    writeln!(page, "\n### {}\n\n{}", message.name(), comment(comments, path)).unwrap();
    if message.field.is_empty() {
        return;
    }
    page.push_str("\n| field | type | |\n| --- | --- | --- |\n");
    for (nth, field) in message.field.iter().enumerate() {
        let path = [path, &[2, i32::try_from(nth).unwrap()]].concat();
        let text = cell(comment(comments, &path));
        let one_of = match field.oneof_index {
            Some(index) if !field.proto3_optional() => {
                let name = message.oneof_decl[usize::try_from(index).unwrap()].name();
                format!(", one of `{name}`")
            }
            Some(_) | None => String::new(),
        };
        writeln!(page, "| `{}` | {}{one_of} | {text} |", field.name(), kind(field)).unwrap();
    }
}

fn enumeration(page: &mut String, of: &EnumDescriptorProto, comments: &Comments, path: &[i32]) {
    writeln!(page, "\n### {}\n\n{}", of.name(), comment(comments, path)).unwrap();
    page.push_str("\n| value | number | |\n| --- | --- | --- |\n");
    for (nth, value) in of.value.iter().enumerate() {
        let path = [path, &[2, i32::try_from(nth).unwrap()]].concat();
        let text = cell(comment(comments, &path));
        writeln!(page, "| `{}` | {} | {text} |", value.name(), value.number()).unwrap();
    }
}

fn services(page: &mut String, file: &FileDescriptorProto, comments: &Comments) {
    for (nth, service) in file.service.iter().enumerate() {
        let path = [6, i32::try_from(nth).unwrap()];
        let name = format!("{PACKAGE}.{}", service.name());
        writeln!(page, "\n## {name}\n\n{}", comment(comments, &path)).unwrap();
        for (nth, method) in service.method.iter().enumerate() {
            let path = [&path[..], &[2, i32::try_from(nth).unwrap()]].concat();
            let stream = |is: bool| if is { "a stream of " } else { "" };
            writeln!(
                page,
                "\n### {}\n\nTakes {}{}, answers with {}{}.\n\n{}",
                method.name(),
                stream(method.client_streaming()),
                linked(method.input_type()),
                stream(method.server_streaming()),
                linked(method.output_type()),
                comment(comments, &path)
            )
            .unwrap();
        }
    }
}

/// The whole page.
fn reference() -> String {
    let set = FileDescriptorSet::decode(seckill::api::FILE_DESCRIPTOR_SET).unwrap();
    let mut ours: Vec<_> = set.file.iter().filter(|file| file.package() == PACKAGE).collect();
    // The service of buyers first, and what both need last.
    let order = ["seckill", "admin", "types", "error_reason"];
    let place = |file: &FileDescriptorProto| {
        order.iter().position(|name| file.name().ends_with(&format!("/{name}.proto"))).unwrap()
    };
    ours.sort_by_key(|file| place(file));
    assert_eq!(ours.len(), order.len());

    let mut page = HEAD.to_owned();
    page.push_str("\n- Services:");
    for file in &ours {
        for service in &file.service {
            let name = format!("{PACKAGE}.{}", service.name());
            write!(page, " [{name}](#{})", name.to_lowercase().replace('.', "")).unwrap();
        }
    }
    page.push_str("\n- [Messages](#messages) · [Enums](#enums)\n");
    for file in &ours {
        services(&mut page, file, &comments(file));
    }
    page.push_str("\n## Messages\n");
    for file in &ours {
        let comments = comments(file);
        for (nth, of) in file.message_type.iter().enumerate() {
            assert!(of.nested_type.is_empty() && of.enum_type.is_empty(), "{}", of.name());
            message(&mut page, of, &comments, &[4, i32::try_from(nth).unwrap()]);
        }
    }
    page.push_str("\n## Enums\n");
    for file in &ours {
        let comments = comments(file);
        for (nth, of) in file.enum_type.iter().enumerate() {
            enumeration(&mut page, of, &comments, &[5, i32::try_from(nth).unwrap()]);
        }
    }
    page
}

#[test]
fn the_api_reference_says_what_the_proto_files_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api.md");
    let current = reference();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(path, &current).unwrap();
    }
    assert!(
        fs::read_to_string(path).unwrap_or_default() == current,
        "docs/api.md is behind: UPDATE_EXPECT=1 cargo test --test suite -- api_reference"
    );
}
