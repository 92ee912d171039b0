// Small parts that every page uses.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api";
import { t } from "../i18n";
import type { Status } from "../types";

type Children = { children?: ComponentChildren };

/** A box of its own that scrolls sideways, so that a wide table never moves the page. */
export function Scroll({ label, tall, children }: Children & { label: string; tall?: boolean }) {
  return (
    <div class={tall ? "scroll tall" : "scroll"} role="region" aria-label={label} tabIndex={0}>
      {children}
    </div>
  );
}

export function Section({ title, aside, children }: Children & { title: string; aside?: ComponentChildren }) {
  return (
    <section>
      <div class="bar">
        <h2>{title}</h2>
        {aside && <div class="controls">{aside}</div>}
      </div>
      {children}
    </section>
  );
}

/** A headline number, its unit in smaller type than the digits. */
export function Card({ title, value, small, main }: { title: string; value: string; small?: string; main?: boolean }) {
  const pieces = value.split(/((?:[^\W\d]|[一-鿿])+|%)/);
  return (
    <div class={main ? "card main" : "card"}>
      <dt>{title}</dt>
      <dd class="value">{pieces.map((piece, n) => (n % 2 ? <span class="unit">{piece}</span> : piece))}</dd>
      <dd class="small">{small}</dd>
    </div>
  );
}

export function Mark({ status }: { status: Status | "problem" }) {
  return <span class={`mark ${status}`}>{t(`status.${status}`)}</span>;
}

/** How far something is, or how much of a budget is spent, which is no good news when it is full. */
export function Meter({ value, most, label, text, budget }: { value: number; most: number; label: string; text?: string; budget?: boolean }) {
  const share = most > 0 ? Math.min(value / most, 1) : 0;
  return (
    <div class="meter">
      {text && (
        <div class="meter-text">
          <span>{label}</span>
          <span>{text}</span>
        </div>
      )}
      <div class="track" role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(100 * share)}>
        <div class={share < 1 ? "fill" : budget ? "fill spent" : "fill full"} style={{ width: `${100 * share}%` }} />
      </div>
    </div>
  );
}

export function Problem({ text }: { text: string }) {
  return text ? <p class="warning" role="alert">{text}</p> : null;
}

export function Empty({ children }: Children) {
  return <p class="note">{children}</p>;
}

/** A group of buttons of which one is pressed. */
export function Switch<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: readonly [T, string][]; onChange: (value: T) => void }) {
  return (
    <div class="switch" role="group" aria-label={label}>
      {options.map(([key, title]) => (
        <button type="button" key={key} aria-pressed={key === value} onClick={() => onChange(key)}>
          {title}
        </button>
      ))}
    </div>
  );
}

/** A button that runs an action, waits for it, and shows what the server says if it fails. */
export function ActionButton({ action, onDone, disabled, danger, main, children }: Children & { action: () => Promise<unknown>; onDone?: () => void; disabled?: boolean; danger?: boolean; main?: boolean }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const run = (): void => {
    setBusy(true);
    setProblem("");
    action()
      .then(() => onDone?.(), (error: unknown) => setProblem(messageOf(error)))
      .finally(() => setBusy(false));
  };
  return (
    <>
      <button type="button" class={danger ? "danger" : main ? "main" : ""} disabled={disabled || busy} onClick={run}>
        {children}
      </button>
      <Problem text={problem} />
    </>
  );
}

/** A button that asks before it acts. */
export function Confirmed({ label, question, detail, action, onDone, disabled }: { label: string; question: string; detail?: string; action: () => Promise<unknown>; onDone?: () => void; disabled?: boolean }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [open, setOpen] = useState(false);
  useEffect(() => {
    if (open) dialog.current?.showModal();
  }, [open]);
  return (
    <>
      <button type="button" class="danger" disabled={disabled} onClick={() => setOpen(true)}>
        {label}
      </button>
      {open && (
        <dialog ref={dialog} onClose={() => setOpen(false)} aria-labelledby="question">
          <h2 id="question">{question}</h2>
          {detail && <p class="note">{detail}</p>}
          <div class="buttons">
            <button type="button" onClick={() => dialog.current?.close()}>
              {t("dialog.cancel")}
            </button>
            <ActionButton danger action={action} onDone={() => (dialog.current?.close(), onDone?.())}>
              {label}
            </ActionButton>
          </div>
        </dialog>
      )}
    </>
  );
}

/** A secret that is shown once, with a button that copies it. */
export function Secret({ label, text }: { label: string; text: string }) {
  const [copied, setCopied] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  const copy = (): void => {
    field.current?.select();
    navigator.clipboard?.writeText(text).then(() => setCopied(true), () => setCopied(document.execCommand("copy")));
  };
  return (
    <div class="secret">
      <label>
        {label}
        <input ref={field} readOnly value={text} onFocus={(event) => event.currentTarget.select()} />
      </label>
      <button type="button" onClick={copy}>{copied ? t("secret.copied") : t("secret.copy")}</button>
      <p class="note">{t("secret.once")}</p>
    </div>
  );
}

export function Pager({ page, pages, onPage }: { page: number; pages: number; onPage: (page: number) => void }) {
  if (pages < 2) return null;
  return (
    <nav class="pager" aria-label={t("pager.label")}>
      <button type="button" disabled={page <= 0} onClick={() => onPage(page - 1)}>{t("pager.before")}</button>
      <span>{t("pager.at", { page: page + 1, pages })}</span>
      <button type="button" disabled={page >= pages - 1} onClick={() => onPage(page + 1)}>{t("pager.next")}</button>
    </nav>
  );
}
