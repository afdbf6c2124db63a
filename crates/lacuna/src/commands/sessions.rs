//! Conversations that outlive a command: `lacuna run --session NAME`, and `lacuna sessions`.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lacuna::files::OutputFile;
use lacuna::{Engine, EngineError, KvPolicy, Message, Sampling, Session};
use lacuna_cli::{output, tell};
use lacuna_kv::folder::{self, SessionName};
use lacuna_kv::saved::{Saved, SavedError};
use serde::{Deserialize, Serialize};

use super::refuse_existing;
use crate::cli::{SessionFolder, SessionsAction, SessionsArgs};

const EXTENSION: &str = "session";
/// Of the file beside a session's that whoever uses the session holds a lock on. The session's own would not do:
/// it is replaced whenever it is saved.
const LOCK_EXTENSION: &str = "lock";

/// What a session's file says besides its tokens.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    /// The model, as it was named.
    model: String,
    /// What was said; nothing where text was continued without a template.
    messages: Vec<Message>,
    /// Whether text was continued without a template; sessions of earlier builds do not say.
    #[serde(default)]
    raw: Option<bool>,
    /// How far the sampler was, for whoever goes on with the same seed.
    seed: u64,
    draws: u128,
}

impl Note {
    fn is_raw(&self) -> bool {
        self.raw.unwrap_or(self.messages.is_empty())
    }
}

/// A session that is this process's until it is dropped, before there is an engine to go on with it.
pub(crate) struct Opened {
    place: Place,
    /// Nothing of a new one.
    saved: Option<(Saved, Note)>,
}

/// Where a session is, which nobody else writes to.
struct Place {
    name: SessionName,
    path: PathBuf,
    _lock: Option<Lock>,
    /// Whether text is continued without a template.
    raw: bool,
}

impl Place {
    fn of(folder: &SessionFolder, name: &SessionName, raw: bool, kv: KvPolicy) -> Result<Self> {
        ensure!(
            kv.can_be_saved(),
            output::Usage(format!(
                "KV memory that is held as `{kv}` cannot be kept in a session; use --kv sparse, or go without a session"
            ))
        );
        let path = folder.made()?.join(file_name(name));
        Ok(Self {
            name: name.clone(),
            _lock: Lock::take(name, &path)?,
            path,
            raw,
        })
    }
}

impl Opened {
    /// The session of that name, or a new one. Refuses at once what could not be gone on with, or kept at the end.
    pub(crate) fn new(
        folder: &SessionFolder,
        name: &SessionName,
        raw: bool,
        kv: KvPolicy,
    ) -> Result<Self> {
        let place = Place::of(folder, name, raw, kv)?;
        let saved = match Saved::open(&place.path) {
            Ok(saved) => {
                let note = note_of(&saved)?;
                match (note.is_raw(), raw) {
                    (true, false) => bail!(
                        "the session `{name}` is text without a chat template; --raw goes on with it, or name another session"
                    ),
                    (false, true) => bail!(
                        "the session `{name}` is a chat, which goes on without --raw; leave it out, or name another session"
                    ),
                    _ => Some((saved, note)),
                }
            }
            Err(SavedError::Io(error)) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("the session `{name}` cannot be read; `lacuna sessions remove {name}` removes it")
                });
            }
        };
        Ok(Self { place, saved })
    }

    /// Goes on with it, and says what was said in it. Where its pages cannot be used, it is computed again from its
    /// tokens, and from its messages where tokens are another model's.
    pub(crate) fn restore(
        self,
        engine: &Engine,
        sampling: &Sampling,
        model: &str,
    ) -> Result<(Named, Session, Vec<Message>)> {
        let Self { place, saved } = self;
        let named = Named {
            place,
            model: model.to_owned(),
            seed: sampling.seed,
        };
        let Some((mut saved, note)) = saved else {
            return Ok((named, engine.session(sampling.clone())?, Vec::new()));
        };
        let Place { name, path, .. } = &named.place;
        let mut session = match engine.restore_session(&mut saved, sampling.clone(), path) {
            Ok(session) => session,
            Err(EngineError::Saved { source: error, .. }) => {
                tell!("session {name}: {error}; what was said is computed again");
                let mut session = engine.session(sampling.clone())?;
                if !matches!(*error, SavedError::Settings(_)) {
                    session.extend(&saved.tokens);
                } else if note.is_raw() {
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
}

/// A conversation under a name.
pub(crate) struct Named {
    place: Place,
    model: String,
    seed: u64,
}

impl Named {
    /// A conversation that will be kept under a name that none has.
    pub(crate) fn create(
        (folder, name): (&SessionFolder, &SessionName),
        model: &str,
        sampling: &Sampling,
        (raw, kv): (bool, KvPolicy),
    ) -> Result<Self> {
        let is_free = || -> Result<()> {
            ensure!(
                !folder.has(name)?,
                "there is a session `{name}` already; `lacuna sessions remove {name}` removes it"
            );
            Ok(())
        };
        is_free()?;
        let place = Place::of(folder, name, raw, kv)?;
        // Whoever had it a moment ago may have saved it since.
        is_free()?;
        Ok(Self {
            place,
            model: model.to_owned(),
            seed: sampling.seed,
        })
    }

    /// Whether it is kept under that name.
    pub(crate) fn is(&self, name: &SessionName) -> bool {
        self.place.name == *name
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
            raw: Some(self.place.raw),
            seed: self.seed,
            draws: session.sampler().position(),
        };
        let note = serde_json::to_string(&note)?;
        let path = &self.place.path;
        let saved = engine.save_session(session, &note, path);
        saved.with_context(|| format!("cannot write the session to `{}`", path.display()))
    }
}

fn note_of(saved: &Saved) -> Result<Note> {
    serde_json::from_str(&saved.note)
        .context("what the session says about itself is not understood")
}

/// That no other process uses a session. The kernel ends it with the process, however that ends.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock of the session whose file is at `session`; none where the file system knows no locks.
    fn take(name: &SessionName, session: &Path) -> Result<Option<Self>> {
        let path = session.with_extension(LOCK_EXTENSION);
        let cannot = || format!("cannot lock the session `{name}` with `{}`", path.display());
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        loop {
            let file = options.open(&path).with_context(cannot)?;
            match file.try_lock() {
                Ok(()) if is_at(&file, &path) => return Ok(Some(Self { path, _file: file })),
                // Whoever had it has just removed the file.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => bail!(
                    "the session `{name}` is in use by another process; end that one first, or name another session"
                ),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(None);
                }
                Err(TryLockError::Error(error)) => return Err(error).with_context(cannot),
            }
        }
    }
}

/// Whether `file` is the one that has the name `path`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let id = |there: fs::Metadata| (there.dev(), there.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(file), Ok(there)) => id(file) == id(there),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

impl Drop for Lock {
    fn drop(&mut self) {
        // One that stays is taken the next time.
        fs::remove_file(&self.path).ok();
    }
}

fn file_name(name: &SessionName) -> String {
    format!("{name}.{EXTENSION}")
}

impl SessionFolder {
    /// The folder, whether it is there or not.
    fn path(&self) -> Result<PathBuf> {
        match &self.sessions {
            Some(path) => Ok(path.clone()),
            None => usual_folder(),
        }
    }

    /// The folder; made for its owner alone when it is not there.
    fn made(&self) -> Result<PathBuf> {
        let path = self.path()?;
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let made = builder.create(&path);
        made.with_context(|| format!("cannot make the folder `{}`", path.display()))?;
        Ok(path)
    }

    /// The folder if it is there. One that was named and is not there is an error.
    fn existing(&self) -> Result<Option<PathBuf>> {
        let path = self.path()?;
        match path.try_exists() {
            Ok(true) => Ok(Some(path)),
            Ok(false) if self.sessions.is_none() => Ok(None),
            Ok(false) => bail!(
                "there is no folder `{}`; check what --sessions or LACUNA_SESSIONS says",
                path.display()
            ),
            Err(error) => {
                Err(error).with_context(|| format!("cannot look for `{}`", path.display()))
            }
        }
    }

    /// The file of a session that is to be there.
    fn existing_file(&self, name: &SessionName) -> Result<PathBuf> {
        let path = self.existing()?.map(|folder| folder.join(file_name(name)));
        let path = path.filter(|path| path.exists());
        path.with_context(|| {
            format!("there is no session `{name}`; `lacuna sessions list` shows those there are")
        })
    }

    /// Whether it has a session of that name.
    pub(crate) fn has(&self, name: &SessionName) -> Result<bool> {
        Ok(self.path()?.join(file_name(name)).exists())
    }

    /// The file of what is typed in chats, for later ones; none where there is no folder for it.
    pub(crate) fn typed(&self) -> Option<PathBuf> {
        Some(self.made().ok()?.join("typed"))
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
        SessionsAction::Export {
            name,
            file,
            overwrite,
            folder,
        } => export(name, file, *overwrite, folder),
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
        Err(error) => row.problem = Some(output::with_causes(&error)),
    }
    Ok(row)
}

fn list(folder: &SessionFolder, json: bool) -> Result<()> {
    let mut rows = Vec::new();
    let entries = folder.existing()?.map(fs::read_dir).transpose()?;
    for entry in entries.into_iter().flatten() {
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
    let path = folder.existing_file(name)?;
    let _lock = Lock::take(name, &path)?;
    fs::remove_file(&path).with_context(|| format!("cannot remove `{}`", path.display()))
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

fn export(name: &SessionName, file: &Path, overwrite: bool, folder: &SessionFolder) -> Result<()> {
    refuse_existing(file, overwrite)?;
    let path = folder.existing_file(name)?;
    let saved = Saved::open(&path);
    let mut saved = saved.with_context(|| format!("the session `{name}` cannot be read"))?;
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
    let path = folder.made()?.join(file_name(&name));
    let _lock = Lock::take(&name, &path)?;
    ensure!(
        !path.exists(),
        "there is a session `{name}` already; give another --name, or remove it first"
    );
    copy_whole(file, &path)?;
    tell!("session {name}: {} tokens", saved.tokens.len());
    Ok(())
}

/// Copies a file to one that its owner alone may read.
fn copy_whole(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> io::Result<()> {
        let mut target = OutputFile::create_private(to)?;
        io::copy(&mut File::open(from)?, &mut target)?;
        target.finish()
    };
    copy().with_context(|| format!("cannot copy `{}` to `{}`", from.display(), to.display()))
}
