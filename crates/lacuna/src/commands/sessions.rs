//! Conversations that outlive a command: `lacuna run --session NAME`, and `lacuna sessions`.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lacuna::{Engine, EngineError, Message, Sampling, Session};
use lacuna_cli::{output, tell};
use lacuna_kv::folder::{self, SessionName};
use lacuna_kv::saved::{Saved, SavedError};
use serde::{Deserialize, Serialize};

use crate::cli::{SessionFolder, SessionsAction, SessionsArgs};

const EXTENSION: &str = "session";

/// What a session's file says besides its tokens.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    /// The model, as it was named.
    model: String,
    /// What was said; nothing where text was continued without a template.
    messages: Vec<Message>,
    /// How far the sampler was, for whoever goes on with the same seed.
    seed: u64,
    draws: u128,
}

/// A conversation under a name.
pub(crate) struct Named {
    path: PathBuf,
    model: String,
    seed: u64,
}

impl Named {
    /// The conversation of that name and what was said in it; a new one if there is none. Where its pages cannot be
    /// used, it is computed again from its tokens, and from its messages where tokens are another model's.
    pub(crate) fn open(
        engine: &Engine,
        sampling: &Sampling,
        (folder, name): (&SessionFolder, &SessionName),
        model: &str,
    ) -> Result<(Self, Session, Vec<Message>)> {
        let path = folder.file(name)?;
        let named = Self {
            path: path.clone(),
            model: model.to_owned(),
            seed: sampling.seed,
        };
        let mut saved = match Saved::open(&path) {
            Ok(saved) => saved,
            Err(SavedError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((named, engine.session(sampling.clone())?, Vec::new()));
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("the session `{name}` cannot be read; `lacuna sessions remove {name}` removes it")
                });
            }
        };
        let note = note_of(&saved)?;
        let mut session = match engine.restore_session(&mut saved, sampling.clone(), &path) {
            Ok(session) => session,
            Err(EngineError::Saved(error)) => {
                tell!("session {name}: {error}; what was said is computed again");
                let mut session = engine.session(sampling.clone())?;
                if !matches!(error, SavedError::Settings(_)) {
                    session.extend(&saved.tokens);
                } else if note.messages.is_empty() {
                    bail!(
                        "the session `{name}` is text of {}, which only that model with its settings can continue; \
                         name another session",
                        note.model
                    );
                }
                session
            }
            Err(error) => return Err(error.into()),
        };
        if note.seed == sampling.seed {
            session.sampler_mut().set_position(note.draws);
        }
        Ok((named, session, note.messages))
    }

    /// A conversation that will be kept under a name that none has.
    pub(crate) fn create(
        (folder, name): (&SessionFolder, &SessionName),
        model: &str,
        sampling: &Sampling,
    ) -> Result<Self> {
        ensure!(
            !folder.has(name)?,
            "there is a session `{name}` already; `lacuna sessions remove {name}` removes it"
        );
        Ok(Self {
            path: folder.file(name)?,
            model: model.to_owned(),
            seed: sampling.seed,
        })
    }

    /// Writes the conversation, in the place of what was there.
    pub(crate) fn save(
        &self,
        engine: &Engine,
        session: &mut Session,
        messages: Vec<Message>,
    ) -> Result<()> {
        let note = Note {
            model: self.model.clone(),
            messages,
            seed: self.seed,
            draws: session.sampler().position(),
        };
        let note = serde_json::to_string(&note)?;
        let saved = engine.save_session(session, &note, &self.path);
        saved.with_context(|| format!("cannot write the session to `{}`", self.path.display()))
    }
}

fn note_of(saved: &Saved) -> Result<Note> {
    serde_json::from_str(&saved.note)
        .context("what the session says about itself is not understood")
}

impl SessionFolder {
    /// The folder; made for its owner alone when it is not there.
    fn path(&self) -> Result<PathBuf> {
        let path = match &self.sessions {
            Some(path) => path.clone(),
            None => usual_folder()?,
        };
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let made = builder.create(&path);
        made.with_context(|| format!("cannot make the folder `{}`", path.display()))?;
        Ok(path)
    }

    /// Whether it has a session of that name.
    pub(crate) fn has(&self, name: &SessionName) -> Result<bool> {
        Ok(self.file(name)?.exists())
    }

    /// The file of what is typed in chats, for later ones; none where there is no folder for it.
    pub(crate) fn typed(&self) -> Option<PathBuf> {
        Some(self.path().ok()?.join("typed"))
    }

    fn file(&self, name: &SessionName) -> Result<PathBuf> {
        Ok(self.path()?.join(format!("{name}.{EXTENSION}")))
    }
}

/// Where programs keep what they would lose nothing but time or talk without.
fn usual_folder() -> Result<PathBuf> {
    lacuna_cli::user_folder("XDG_STATE_HOME", ".local/state", "lacuna/sessions")
        .context("there is no home folder to keep sessions in; give --sessions DIR")
}

pub(crate) fn run(args: &SessionsArgs) -> Result<()> {
    match &args.action {
        SessionsAction::List {
            folder,
            served,
            json,
        } => match &served.kv_cache {
            Some(root) => list_served(root, *json),
            None => list(folder, *json),
        },
        SessionsAction::Remove {
            name,
            folder,
            served,
        } => match &served.kv_cache {
            Some(root) => remove_served(name, root),
            None => remove(name, folder),
        },
        SessionsAction::Export { name, file, folder } => export(name, file, folder),
        SessionsAction::Import { file, name, folder } => import(file, name.as_ref(), folder),
    }
}

#[derive(Serialize)]
struct Row {
    name: String,
    model: Option<String>,
    messages: usize,
    tokens: usize,
    /// Tokens that need not be computed again.
    cached_tokens: usize,
    bytes: u64,
    idle_seconds: Option<u64>,
    /// Why it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

fn row(path: &Path, name: String) -> Result<Row> {
    let file = fs::metadata(path)?;
    let used = file.modified().ok();
    let idle = used.and_then(|used| SystemTime::now().duration_since(used).ok());
    let mut row = Row {
        name,
        model: None,
        messages: 0,
        tokens: 0,
        cached_tokens: 0,
        bytes: file.len(),
        idle_seconds: idle.map(|idle| idle.as_secs()),
        problem: None,
    };
    let saved = Saved::open(path).map_err(anyhow::Error::from);
    match saved.and_then(|saved| Ok((note_of(&saved)?, saved))) {
        Ok((note, saved)) => {
            row.model = Some(note.model);
            row.messages = note.messages.len();
            (row.tokens, row.cached_tokens) = (saved.tokens.len(), saved.cached);
        }
        Err(error) => row.problem = Some(format!("{error:#}")),
    }
    Ok(row)
}

fn list(folder: &SessionFolder, json: bool) -> Result<()> {
    let folder = folder.path()?;
    let mut rows = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(OsStr::to_str);
        if let Some(name) = name.filter(|_| path.extension() == Some(OsStr::new(EXTENSION))) {
            rows.push(row(&path, name.to_owned())?);
        }
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    if json {
        return output::json(&rows);
    }
    output::print(|out| {
        for row in &rows {
            let bytes = output::bytes(row.bytes);
            match (&row.problem, &row.model) {
                (None, Some(model)) => writeln!(
                    out,
                    "{}: {} messages, {} tokens, {bytes}, of {model}",
                    row.name, row.messages, row.tokens
                )?,
                (problem, _) => writeln!(
                    out,
                    "{}: {bytes}, {}",
                    row.name,
                    problem.as_deref().unwrap_or_default()
                )?,
            }
        }
        Ok(())
    })
}

fn remove(name: &SessionName, folder: &SessionFolder) -> Result<()> {
    let path = folder.file(name)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(no_session(name)),
        removed => removed.with_context(|| format!("cannot remove `{}`", path.display())),
    }
}

#[derive(Serialize)]
struct ServedRow {
    name: String,
    tokens: usize,
    bytes: u64,
    idle_seconds: Option<u64>,
    /// What computed it, as the cache folder calls it.
    settings: String,
}

fn list_served(root: &Path, json: bool) -> Result<()> {
    let sessions = folder::sessions(root);
    let sessions = sessions.with_context(|| format!("cannot read `{}`", root.display()))?;
    let row = |session: folder::KeptSession| ServedRow {
        name: session.id.name.to_string(),
        tokens: session.tokens,
        bytes: session.bytes,
        idle_seconds: SystemTime::now()
            .duration_since(session.used)
            .ok()
            .map(|idle| idle.as_secs()),
        settings: session.fingerprint,
    };
    let rows: Vec<ServedRow> = sessions.into_iter().map(row).collect();
    if json {
        return output::json(&rows);
    }
    output::print(|out| {
        for row in &rows {
            let bytes = output::bytes(row.bytes);
            writeln!(
                out,
                "{}: {} tokens, {bytes}, computed by {}",
                row.name, row.tokens, row.settings
            )?;
        }
        Ok(())
    })
}

fn remove_served(name: &SessionName, root: &Path) -> Result<()> {
    let removed = folder::remove_session(root, name, None);
    match removed.with_context(|| format!("cannot remove from `{}`", root.display()))? {
        0 => bail!(
            "there is no session `{name}`; `lacuna sessions list --kv-cache {}` shows those there are",
            root.display()
        ),
        _ => Ok(()),
    }
}

fn no_session(name: &SessionName) -> anyhow::Error {
    anyhow!("there is no session `{name}`; `lacuna sessions list` shows those there are")
}

fn export(name: &SessionName, file: &Path, folder: &SessionFolder) -> Result<()> {
    let path = folder.file(name)?;
    let mut saved = match Saved::open(&path) {
        Err(SavedError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Err(no_session(name));
        }
        saved => saved.with_context(|| format!("the session `{name}` cannot be read"))?,
    };
    let whole = saved.verify();
    whole.with_context(|| format!("the session `{name}` cannot be exported"))?;
    copy_whole(&path, file)
}

fn import(file: &Path, name: Option<&SessionName>, folder: &SessionFolder) -> Result<()> {
    let unusable = || format!("`{}` is no session that can be used", file.display());
    let mut saved = Saved::open(file).with_context(unusable)?;
    saved.verify().with_context(unusable)?;
    note_of(&saved).with_context(unusable)?;
    let stem = file.file_stem().and_then(OsStr::to_str);
    let name = match (name, stem) {
        (Some(name), _) => name.clone(),
        (None, stem) => stem
            .unwrap_or_default()
            .parse()
            .map_err(|why| anyhow!("{why}; give the session a name with --name"))?,
    };
    let path = folder.file(&name)?;
    ensure!(
        !path.exists(),
        "there is a session `{name}` already; give another --name, or remove it first"
    );
    copy_whole(file, &path)?;
    tell!("session {name}: {} tokens", saved.tokens.len());
    Ok(())
}

/// Copies a file that its owner alone may read, so that there is never half of it under its name.
fn copy_whole(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> io::Result<()> {
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
        let part = to.with_extension("part");
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut target = options.open(&part)?;
        let copied = io::copy(&mut fs::File::open(from)?, &mut target)
            .and_then(|_| target.sync_all())
            .and_then(|()| fs::rename(&part, to));
        if copied.is_err() {
            fs::remove_file(&part).ok();
        }
        copied?;
        if let (Some(folder), true) = (folder, cfg!(unix)) {
            fs::File::open(folder)?.sync_all()?;
        }
        Ok(())
    };
    copy().with_context(|| format!("cannot copy `{}` to `{}`", from.display(), to.display()))
}
